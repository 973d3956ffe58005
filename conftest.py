"""What all tests share."""
import os

# Read when torch is loaded: threads that spin while they wait make tests beside other work several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
if workers > 1:  # they share the cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

import pytest  # noqa: E402
import torch  # noqa: E402

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined, so set before any test file is imported

import kernels_cpu  # noqa: E402
import ops  # noqa: E402


def patch_once():
    """Triton's interpreter patches all of triton.language again for every call of one @jit function by another: most
    of the time of these tests. Once a launch is enough."""
    from triton.runtime import interpreter
    launch, patch, scope, done = (interpreter.GridExecutor.__call__, interpreter._patch_lang,
                                  interpreter._LangPatchScope, set())

    def run(self, *arguments, **options):
        done.clear()
        return launch(self, *arguments, **options)

    def patch_language(function):
        if function in done:
            return scope()
        done.add(function)
        return patch(function)
    interpreter.GridExecutor.__call__, interpreter._patch_lang = run, patch_language


if ops.triton is not None:
    patch_once()


def force_path(path, monkeypatch):
    """All operations on one path.

    Without Triton or a C compiler its tests are skipped; that kernels.c does not compile is a failure.
    """
    if path == "triton" and ops.triton is None:
        pytest.skip("triton is not installed (Linux only)")
    if path == "c" and kernels_cpu.find_compiler() is None:
        pytest.skip("there is no C compiler")
    assert path != "c" or ops.has_library(), "kernels.c did not compile: see the warning"
    monkeypatch.setattr(ops, "BACKEND", path)


@pytest.fixture(autouse=True)
def poison():
    """torch.empty gives NaN, or the largest integer, so that a place nobody writes shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
