"""Programs that try to pass their tests without solving the task. None may score; honest ones must.

They were written to cheat, without regard to how the grader works: many fail for several reasons at once.
"""

from typing import Any

import pytest

from engine.tasks.code_rewards import python_tests
from engine.trajectory import Prompt, Trajectory

TASKS: dict[str, tuple[str, Any]] = {
    "add": ("def add(a, b): return a + b", ["assert add(1, 2) == 3", "assert add(5, -7) == -2"]),
    "all": ("def add(a, b): return a + b", "assert all(add(a, 1) == a + 1 for a in [1, 2])"),
    "loop": ("def add(a, b): return a + b", "for a in range(5):\n    assert add(a, 1) == a + 1"),
    "near": ("def half(a): return a / 2", "assert abs(half(5) - 2.5) < 1e-6"),
    "positive": ("def positive(a): return a > 0", "assert all(map(positive, [1, 2]))"),
    "order": ("def order(xs): return sorted(xs)", "xs = [3, 1, 2]\nassert order(xs) == sorted(xs)"),
    "sum": ("def sum(a, b): return a + b", "assert sum(10, 15) == 25"),
    "call": (
        "class Solution:\n def add(self, a, b): return a + b",
        {"fn_name": "add", "inputs": [[1, 2], [5, 6]], "outputs": [3, 11]},
    ),
    "one": ("def one(): return 1", {"fn_name": "one", "inputs": [[]], "outputs": [1]}),
    "double": ("print(int(input()) * 2)", {"inputs": ["4", "20"], "outputs": ["8", "40"]}),
    "evaluated": ("def text(): return '1 + 2'", "assert eval(text()) == 3\nassert eval(text()) == 3"),
    "unpickled": (
        "import pickle\ndef data(): return pickle.dumps(3)", "import pickle\nassert pickle.loads(data()) == 3"
    ),
    "in place": (
        "def turn(rows):\n rows.reverse()\n rows[0].clear()\n return rows",
        "from unittest.mock import Mock\nrows, mock = [[1], [2]], Mock()\nturn(rows)\nassert rows == [[], [1]]\n"
        "mock(rows)\nmock.assert_called_once_with([[], [1]])",
    ),
    "endless": (
        "def count(xs):\n while True: yield from xs",
        "from itertools import islice\nxs = count([1, 2])\nassert list(islice(xs, 3)) == [1, 2, 1] and next(xs) == 2",
    ),
    "imported": (
        "def add(a, b): return a + b\nif __name__ == '__main__': print(add(int(input()), 1))",
        "from solution import add\ndef test_add(): assert add(1, 2) == 3",
    ),
    "measured": ("def pair(a): return [a, a]", "from solution import pair\nassert len(pair(1)) == 2"),
    "called by the test": (
        "def shorten(xs): xs.pop()",
        "xs = [1, 2]\ndef test_shorten():\n shorten(xs)\n assert xs == [1]\ntest_shorten()",
    ),
    "long": ("print('12345678\\n' * 200_000)", {"input": "", "output": "12345678\n" * 200_000}),
}  # fmt: skip
"""For each task an honest program, and the tests."""

HONEST = {
    "output at exit": "import atexit\nout = [str(int(input()) * 2)]\natexit.register(lambda: print(*out))",
    "output of a destructor": "class D:\n def __del__(self): print(self.x)\nd = D()\nd.x = int(input()) * 2",
    "an open file": "out = open(1, 'w')\nout.write(str(int(input()) * 2))",
    "a stream that needs its module": "import io, os, sys\nclass Out(io.StringIO):\n"
    " def flush(self): os.write(1, self.getvalue().encode())\nsys.stdout = Out()\nprint(int(input()) * 2)",
    "closed output": "import sys\nprint(int(input()) * 2)\nsys.stdout.close()",
    "a closed descriptor": "import os\nprint(int(input()) * 2, flush=True)\nos.close(1)",
    "its own output": "import io, sys\nsys.stdout = io.StringIO()\nprint(int(input()) * 2)\n"
    "sys.__stdout__.write(sys.stdout.getvalue())",
    "an exit": "import sys\nprint(int(input()) * 2)\nsys.exit(0)",
    "input to its end": "print(int(input()) * 2)\ntry:\n while True: input()\nexcept EOFError: pass",
    "a device": "print(int(open('/dev/stdin').read()) * 2)",
    "raw input": "import sys\nassert sys.stdin.mode == 'r' and sys.stdin.buffer.peek(1)\n"
    "sys.stdout.buffer.write(b'%d' % (int(sys.stdin.buffer.readline()) * 2))",
    "a thread with a large stack": "import threading\nthreading.stack_size(1 << 26)\n"
    "thread = threading.Thread(target=lambda: print(int(input()) * 2))\nthread.start()\nthread.join()",
    "deep recursion": "import functools, sys\nsys.setrecursionlimit(10**6)\n@functools.lru_cache(None)\n"
    "def f(n): return n and f(n - 1) + 1\nprint(f(50_000) - 50_000 + int(input()) * 2)",
    "a main module": "import pickle\nclass A: pass\nif __name__ == '__main__':\n"
    " assert type(pickle.loads(pickle.dumps(A()))) is A\n print(int(input()) * 2)",
}
"""Programs for the task `double`."""

EQUAL = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __sub__(self, other): return self
    __abs__ = __neg__ = lambda self: self
    def __iter__(self): return iter([self])
    def __call__(self, *a, **k): return self
    def __getattr__(self, name): return self
"""
READ = """
import re
def answer(text):
    global found
    found = re.findall(r'(?:==|outputs?\\W+)\\s*\\[?(-?\\d+)', text)
    return int(found[0]) if found else 0
def everything():
    import glob, os
    parts = []
    for name in [__file__, *glob.glob('*'), *glob.glob('.*'), *glob.glob('../*/*'), *glob.glob('/tmp/*'),
                 *glob.glob('/tmp/*/*'), *glob.glob('/proc/*/cmdline'), *glob.glob('/proc/*/environ')]:
        try: parts.append(open(name, errors='replace').read(20000))
        except Exception: pass
    return '\\n'.join(parts)
"""
ENDS = {
    "exit": "import sys\nsys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "exit of a function": "def add(a, b):\n import os\n os._exit(0)",
    "exit with a number": "def add(a, b):\n raise SystemExit(0)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\nraise ValueError",
    "excepthook": "import os, sys\nsys.excepthook = lambda *a: os._exit(0)\nraise ValueError",
    "another program": "import os\nos.execv('/bin/true', ['true'])",
    "a timer": "import os, signal\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.05)\ndef add(a, b):\n while True: pass",
    "a signal": "import os, signal\nsignal.signal(signal.SIGTERM, lambda *a: os._exit(0))\n"
    "def add(a, b): os.kill(os.getpid(), signal.SIGTERM)",
    "a thread": "import os, threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), os._exit(0))).start()\n"
    "def add(a, b): time.sleep(1)",
    "a child": "import os\nif os.fork(): os._exit(0)\ndef add(a, b): return 0",
    "kill the parent": "import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)\nos._exit(0)",
    "a destructor": "import os\nclass D:\n def __del__(self): os._exit(0)\nd = D()\ndel d\ndef add(a, b): return 0",
    "memory": "def add(a, b): raise MemoryError",
    "recursion": "def add(a, b): return add(a, b)",
}
LIES = {
    "equal to everything": "def add(a, b): return Equal()",
    "a number equal to everything": "class N(int, Equal):\n __eq__ = Equal.__eq__\n __hash__ = int.__hash__\n"
    "def add(a, b): return N(0)",
    "a class that lies": "class L(Equal):\n __class__ = int\ndef add(a, b): return L()",
    "a metaclass": "class M(type):\n __eq__ = Equal.__eq__\n __hash__ = Equal.__hash__\nclass C(metaclass=M): pass\n"
    "def add(a, b): return C",
    "mock.ANY": "from unittest.mock import ANY\ndef add(a, b): return ANY",
    "numpy": "import numpy as np\nclass A(np.ndarray):\n def __eq__(self, other): return np.True_\n"
    "def add(a, b): return np.zeros(1).view(A)",
    "a wide array": "import numpy as np\ndef add(a, b): return np.array([a, b, 3, -2]).view(W)\n"
    "class W(np.ndarray):\n def __bool__(self): return True",
    "the function is equal": "add = Equal()",
    "a decorated function": "import functools\n@functools.lru_cache\ndef add(a, b): return Equal()",
    "a text equal to everything": "class T(str):\n __eq__ = Equal.__eq__\n __hash__ = str.__hash__\n"
    "def add(a, b): return T('x')",
}
READS = {
    "the file": "def add(a, b): return answer(open(__file__).read())",
    "all files": "def add(a, b): return answer(everything())",
    "lines of the test": "import linecache, sys\ndef add(a, b):\n f = sys._getframe(1)\n"
    " return answer(linecache.getline(f.f_code.co_filename, f.f_lineno))",
    "constants of the caller": "import sys\ndef add(a, b):\n f, out = sys._getframe(1), []\n while f:\n"
    "  out += [c for c in f.f_code.co_consts if type(c) is int and c not in (0, 1, a, b)]\n  f = f.f_back\n"
    " return out[0] if out else 0",
    "locals of the caller": "import sys\ndef add(a, b):\n f = sys._getframe(1)\n while f:\n"
    "  if 'expected' in f.f_locals: return f.f_locals['expected']\n  f = f.f_back\n return 0",
    "the collector": "import gc\ndef add(a, b): return answer(' '.join(repr(o)[:9999] for o in gc.get_objects()"
    " if type(o) in (dict, list, tuple)))",
    "its memory": "def add(a, b):\n text = ''\n for line in open('/proc/self/maps'):\n  if 'rw' not in line: continue\n"
    "  low, high = (int(x, 16) for x in line.split()[0].split('-'))\n"
    "  with open('/proc/self/mem', 'rb') as m:\n   m.seek(low)\n"
    "   try: text += m.read(min(high - low, 1 << 22)).decode('latin1')\n"
    "   except Exception: pass\n found = re.findall(r'assert add\\(%d, %d\\) == (-?\\d+)' % (a, b), text)\n"
    " return int(found[0]) if found else 0",
    "open files": "import os\nparts = []\nfor fd in range(64):\n"
    " try: parts.append(os.pread(fd, 1 << 16, 0).decode('latin1'))\n"
    " except Exception: pass\ndef add(a, b): return answer(' '.join(parts))",
    "memory of the parent": "import os\ndef add(a, b): return answer(open('/proc/%d/mem' % os.getppid(), 'rb').read(99)"
    ".decode('latin1'))",
}
REPLACES = {
    "json": "import json\njson.loads = lambda text: ([1, 2], Equal())\njson.dumps = lambda value: '3'\n"
    "def add(a, b): return Equal()",
    "modules": "import sys, types\nfake = types.ModuleType('json')\nfake.loads = lambda text: ((), Equal())\n"
    "fake.dumps = str\nsys.modules['json'] = fake\ndef add(*a): return Equal()",
    "a line of the test": "import sys\ndef jump(frame, event, arg):\n if event == 'line':\n"
    "  try: frame.f_lineno += 1\n  except Exception: pass\n return jump\ndef add(a, b):\n f = sys._getframe(1)\n"
    " while f: f.f_trace = jump; f = f.f_back\n sys.settrace(jump)\n return 0",
    "small integers": "import ctypes\nfor n in (3, 11):\n ctypes.memmove(id(n) + 24, id(7) + 24, 4)\n"
    "def add(a, b): return 7",
    "exceptions": "import builtins, sys\nbuiltins.AssertionError = type('A', (Exception,), {})\n"
    "def add(a, b):\n f = sys._getframe(1)\n f.f_globals['add'] = lambda a, b: Equal()\n return Equal()",
    "the known walk": "import gc, os, re, sys\ndef add(a, b):\n seen, f = set(), sys._getframe(0)\n while f:\n"
    "  seen |= set(re.findall(r'[0-9a-f]{32}', repr(f.f_locals)))\n  f = f.f_back\n"
    " for sign in seen:\n  for fd in range(3, 64):\n   try: os.write(fd, sign.encode())\n   except OSError: pass\n"
    " os._exit(0)",
    "every file": "import os\nfor word in (b'ok', b'1', b'true', b'passed', b'{\"value\": 3}\\n',"
    " b'{\"ready\": true}\\n'):\n for fd in range(64):\n  try: os.write(fd, word)\n  except OSError: pass\nos._exit(0)",
    "ptrace": "import ctypes, os\nc = ctypes.CDLL(None)\nassert c.ptrace(16, os.getppid(), 0, 0) == 0\nos._exit(0)",
}
EVALUATED = {
    "an exit status": "import os\nos._exit(77)",
    "an end": "import os\nos._exit(0)",
    "an exit": "raise SystemExit(0)",
    "every frame": "import os, re, sys\nseen, f = set(), sys._getframe(0)\nwhile f:\n"
    " seen |= set(re.findall('[0-9a-f]{32}', repr(f.f_locals) + repr(f.f_globals)))\n f = f.f_back\n",
    "the collector": "import gc, os, sys\nseen, f, every = set(), sys._getframe(0), gc.get_objects()\nwhile f:\n"
    " every.append(f)\n f = f.f_back\n"
    "for one in every: seen |= {x for x in gc.get_referents(one) if type(x) is str and len(x) == 32}",
}
SEND = """
import json
for sign in seen:
    for fd in range(64):
        try: os.write(fd, json.dumps({"sign": sign, "used": True}).encode())
        except OSError: pass
os._exit(0)
"""
ONE_HASH = """
import os, socket
def one():
    M = 2**61 - 1
    keys = b', '.join(b'[{"int": "%x"}, 0]' % (M * i) for i in range(100_000))
    socket.socket(fileno=3).sendall(b'{"value": {"dict": [' + keys + b']}}\\n')
    os._exit(0)
"""
"""A reply with 100 000 integers that have the same hash: Python needs minutes to make a dictionary of them."""
OTHERS: dict[str, tuple[str, str]] = {
    "all() is true": ("all", "def all(xs): return True\ndef add(a, b): return 0"),
    "range() is empty": ("loop", "def range(*a): return []\ndef add(a, b): return 0"),
    "abs() is 0": ("near", "def abs(a): return 0\ndef half(a): return 0.0"),
    "builtins are replaced": ("near", "import builtins\nbuiltins.abs = lambda a: 0\ndef half(a): return 0.0"),
    "the end of an iterator": ("positive", "def positive(a): raise StopIteration"),
    "the argument is emptied": ("order", "def order(xs):\n xs.clear()\n return []"),
    "the argument is returned": ("order", "def order(xs):\n global sorted\n sorted = lambda xs: xs\n return xs"),
    "a builtin is equal": ("sum", EQUAL + "def sum(a, b): return Equal()"),
    "json is replaced": ("call", EQUAL + "def add(a, b): return 0\n" + REPLACES["json"]),
    "a method of anything": ("call", EQUAL + "class Solution(Equal): pass"),
    "a method that looks": ("call", READ + "class Solution:\n def add(self, a, b): return answer(everything())"),
    "true is not 1": ("one", "def one(): return True"),
    "not a number": ("one", "def one(): return float('nan')"),
    "a list of guesses": ("one", "def one(): return [[1], 1]"),
    "a dictionary that is equal": ("one", "class D(dict):\n def __eq__(self, o): return True\ndef one(): return D()"),
    "text that is a number": ("one", "def one(): return '1'"),
    "keys with one hash": ("one", ONE_HASH),
    "keys with one hash for a test": ("add", ONE_HASH.replace("one()", "add(a, b)")),
    "an exit in place of data": (
        "unpickled",
        "import os, pickle\nclass E:\n def __reduce__(self): return os._exit, (77,)\n"
        "def data(): return pickle.dumps(E())",
    ),
    "all numbers": ("double", "for i in range(100): print(i)"),
    "no output": ("double", ""),
    "output to another stream": ("double", "import sys\nprint(8, 40, file=sys.stderr)\nsys.exit(0)"),
    "output that overwrites itself": ("double", "print('1\\b8\\r40\\x1b[2K8')"),
    "output of the input": ("double", "print(input())"),
    "output that is wrapped": ("double", "import sys\nsys.stdout.write = lambda text: len(text)\nprint(8)"),
    "output by the looks": ("double", READ + "print(answer(everything()))"),
    "the right output and an error": ("double", "print(int(input()) * 2)\nraise ValueError"),
    "the right output and a bad exit": ("double", "print(int(input()) * 2)\nimport sys\nsys.exit(1)"),
}
FORGERIES = {f"ends: {name}": ("add", code) for name, code in ENDS.items()}
FORGERIES |= {f"lies: {name}": ("add", EQUAL + code) for name, code in LIES.items()}
FORGERIES |= {f"reads: {name}": ("add", READ + code) for name, code in READS.items()}
FORGERIES |= {f"replaces: {name}": ("add", EQUAL + code) for name, code in REPLACES.items()}
FORGERIES |= OTHERS
for name, code in EVALUATED.items():
    text = f"exec({code + SEND * ('seen' in code)!r})"
    FORGERIES[f"evaluated: {name}"] = ("evaluated", f"def text(): return {text!r}")


def score(code: str, tests: Any, **arguments: Any) -> float:
    response = Trajectory(text=f"```python\n{code}\n```")
    return python_tests(Prompt(row=0, text="?", fields={"tests": tests}), response, **arguments)


@pytest.mark.parametrize("task", TASKS)
def test_an_honest_solution_passes(task: str) -> None:
    assert score(*TASKS[task]) == 1.0


@pytest.mark.parametrize("what", HONEST)
def test_an_honest_program_passes_however_it_reads_and_writes(what: str) -> None:
    assert score(HONEST[what], TASKS["double"][1]) == 1.0


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_scores_nothing(name: str) -> None:
    task, code = FORGERIES[name]
    assert score(code, TASKS[task][1], limit_s=3.0) == 0.0
