// The library's own facts.
#include "common.cuh"

DSPARK_EXPORT int dspark_plugin_abi(void) { return DSPARK_PLUGIN_ABI; }
