# Sourced by the scripts that run tests on a GPU machine: folders become packages by links, on PYTHONPATH until the
# script ends, so that nothing has to be installed.
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
mkdir "$packages/dspark_trt"
for folder in builder plugins runtime_py; do ln -s "$PWD/$folder" "$packages/dspark_trt/$folder"; done
export PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH}
