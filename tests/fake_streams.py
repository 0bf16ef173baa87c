"""Streams that a test plays in the place of torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class FakeStreams:
    """Which stream is the current one; a subclass makes them, and ``main`` first."""

    current: Any

    def stream(self, device: Any = None) -> Any:
        """A new stream."""
        raise NotImplementedError

    @contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", self.stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.use)
