"""State that code refers to, in scripts: what has it, how a body reads a flag of it, and a change.

A verdict on a body that reads it must not outlive the change.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

HEAD: Final = """\
import abc, builtins, collections, contextlib, contextvars, dataclasses, enum, functools, importlib
import io, logging, math, operator, os, sys, threading, types, typing, weakref
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
class Box:
    def __init__(self, on=True): self.on = on
class Other: on = False
"""


@dataclass(frozen=True)
class State:
    """Statements that make it, an expression that is true, and statements that make it false."""

    make: str
    read: str
    change: str

    def script(self, undo: list[Any]) -> tuple[Callable[[], bool], Callable[[], None]]:
        """Runs it again; returns what reads it, and what changes it."""
        module = types.ModuleType("script_of_a_user")
        source = f"{HEAD}{self.make}\ndef read(): return {self.read}\n"
        exec(compile(source, "script.py", "exec"), vars(module))

        def change() -> None:
            vars(module)["undo"] = undo
            exec(compile(self.change, "change.py", "exec"), vars(module))

        return vars(module)["read"], change


_ABC: Final = "class A(abc.ABC): pass\nclass B: pass\nb = B()"
_CLASS: Final = "class A: on = True\nclass B(A): pass\nb = B()"
_ROW: Final = "d = {'a': True, 'b': False}"
_SETTINGS: Final = (
    "s = sys.modules['script_settings'] = types.ModuleType('script_settings'); s.on = True"
)
_SMALL: Final = (
    "class S(str):\n"
    "    def __eq__(self, other): return self.lower() == other.lower()\n"
    "    def __hash__(self): return hash(self.lower())\n"
)
_UNDONE: Final = "undo.append(lambda: {})\n"

STATES: Final[Mapping[str, State]] = {
    "closure cell": State(
        "def make():\n    on = True\n    return lambda: on\nf = make()",
        "f()",
        "f.__closure__[0].cell_contents = False",
    ),
    "empty cell": State(
        "def make():\n"
        "    def get():\n"
        "        try: return on\n"
        "        except NameError: return True\n"
        "    def put():\n"
        "        nonlocal on\n"
        "        on = False\n"
        "    if not builtins: on = 0\n"
        "    return get, put\n"
        "get, put = make()",
        "get()",
        "put()",
    ),
    "self of a bound method": State(
        "class A:\n    on = True\n    def get(self): return self.on\na = A(); m = a.get",
        "m()",
        "a.on = False",
    ),
    "method of a class": State(
        "class A:\n    def get(self): return True\na = A()", "a.get()", "A.get = lambda s: False"
    ),
    "inherited attribute": State(_CLASS, "b.on", "A.on = False"),
    "attribute that hides an inherited one": State(_CLASS, "b.on", "B.on = False"),
    "bases of a class": State(_CLASS, "b.on", "class A2: on = False\nB.__bases__ = (A2,)"),
    "class of an object": State("b = Box()", "b.on", "b.__dict__.clear(); b.__class__ = Other"),
    "metaclass": State(
        "class M(type): on = True\nclass A(metaclass=M): pass", "A.on", "M.on = False"
    ),
    "property": State(
        "class A:\n    @property\n    def on(self): return True\na = A()",
        "a.on",
        "A.on = property(lambda s: False)",
    ),
    "descriptor": State(
        "class D:\n    on = True\n    def __get__(self, i, o=None): return self.on\n"
        "class A: on = D()\na = A()",
        "a.on",
        "vars(A)['on'].on = False",
    ),
    "__getattr__ of a module": State(
        "m = types.ModuleType('script_m'); m.values = {'on': True}\n"
        "exec('def __getattr__(name): return values[name]', vars(m))",
        "m.on",
        "m.values['on'] = False",
    ),
    "__getattribute__": State(
        "b = Box()",
        "b.on",
        "Box.__getattribute__ = lambda s, n: n != 'on' and object.__getattribute__(s, n)",
    ),
    "private slot": State(
        "class A:\n    __slots__ = ('__on',)\n    def get(self): return self.__on\n"
        "class B(A): __slots__ = ()\nb = B(); b._A__on = True",
        "b.get()",
        "b._A__on = False",
    ),
    "default of a dataclass": State(
        "@dataclasses.dataclass\nclass A: on: bool = True",
        "A().on",
        "A.__init__.__defaults__ = (False,)",
    ),
    "metadata of a dataclass": State(
        "@dataclasses.dataclass\n"
        "class A: on: int = dataclasses.field(default=0, metadata={'on': Box()})",
        "A.__dataclass_fields__['on'].metadata['on'].on",
        "A.__dataclass_fields__['on'].metadata['on'].on = False",
    ),
    "frozen dataclass": State(
        "@dataclasses.dataclass(frozen=True)\nclass A: on: bool = True\na = A()",
        "a.on",
        "object.__setattr__(a, 'on', False)",
    ),
    "member of an enum": State(
        "class E(enum.Enum): ON = 1\nE.ON.flag = True", "E.ON.flag", "E.ON.flag = False"
    ),
    "default of a context variable": State(
        "v = contextvars.ContextVar('v', default=Box())", "v.get().on", "v.get().on = False"
    ),
    "context variable": State(
        "v = contextvars.ContextVar('v', default=True)", "v.get()", "v.set(False)"
    ),
    "result of lru_cache": State(
        "@functools.lru_cache\ndef f(): return Box()\nf()", "f().on", "f().on = False"
    ),
    "attribute of a cached function": State(
        "@functools.lru_cache\ndef f(): return 1\nf.on = True", "f.on", "f.on = False"
    ),
    "factory of a defaultdict": State(
        "d = collections.defaultdict(lambda: True)",
        "d.default_factory()",
        "d.default_factory = lambda: False",
    ),
    "__missing__ of a dict": State(
        "class D(dict):\n    def __missing__(self, key): return True\nd = D()",
        "d['on']",
        "D.__missing__ = lambda s, k: False",
    ),
    "weak reference": State("b = Box(); r = weakref.ref(b)", "r().on", "b.on = False"),
    "weak proxy": State("b = Box(); r = weakref.proxy(b)", "r.on", "b.on = False"),
    "key of a WeakKeyDictionary": State(
        "b = Box(); d = weakref.WeakKeyDictionary({b: 1})", "next(iter(d)).on", "b.on = False"
    ),
    "numpy array": State("a = np.ones(3)", "a[0] == 1", "a[0] = 0"),
    "large numpy array": State("a = np.ones(10000)", "a[5000] == 1", "a[5000] = 0"),
    "objects in a numpy array": State(
        "a = np.array([Box(), None], dtype=object)", "a[0].on", "a[0].on = False"
    ),
    "shape of a numpy array": State("a = np.ones((2, 3))", "a.shape[0] == 2", "a.shape = 3, 2"),
    "mask of a numpy array": State(
        "a = np.ma.masked_array([1.0, 2.0], mask=[0, 0])", "not a.mask[0]", "a[0] = np.ma.masked"
    ),
    "dates of numpy": State(
        "a = np.array(['2020-01-01'], dtype='M8[D]')", "a[0].astype(int) > 0", "a[0] = '1960-01-01'"
    ),
    "memoryview": State("b = bytearray([1]); m = memoryview(b)", "m[0] == 1", "b[0] = 0"),
    "environment": State(
        "os.environ.pop('SCRIPT_ON', None)",
        "os.getenv('SCRIPT_ON', '1') == '1'",
        _UNDONE.format("os.environ.pop('SCRIPT_ON', None)") + "os.environ['SCRIPT_ON'] = '0'",
    ),
    "sys.argv": State(
        "", "'--off' not in sys.argv", _UNDONE.format("sys.argv.pop()") + "sys.argv.append('--off')"
    ),
    "level of a logger": State(
        "log = logging.getLogger('script')\nlog.setLevel(20)", "log.level == 20", "log.setLevel(10)"
    ),
    "deterministic algorithms": State(
        "",
        "not torch.are_deterministic_algorithms_enabled()",
        _UNDONE.format("torch.use_deterministic_algorithms(False)")
        + "torch.use_deterministic_algorithms(True)",
    ),
    "switch of cudnn": State(
        "",
        "not torch.backends.cudnn.benchmark",
        # Flags may be frozen, by torch's test utilities, but for this.
        "c = torch.backends.cudnn.flags(enabled=True, benchmark=True)\n"
        + _UNDONE.format("c.__exit__(None, None, None)")
        + "c.__enter__()",
    ),
    "default device": State(
        "",
        "torch.get_default_device().type == 'cpu'",
        _UNDONE.format("torch.set_default_device(None)") + "torch.set_default_device('meta')",
    ),
    "flag in torch": State("torch.script_on = True", "torch.script_on", "torch.script_on = False"),
    "flag in builtins": State(
        "builtins.SCRIPT_ON = True", "SCRIPT_ON", "builtins.SCRIPT_ON = False"
    ),
    "function of math": State(
        "was = math.sqrt",
        "math.sqrt(4) == 2",
        _UNDONE.format("setattr(math, 'sqrt', was)") + "math.sqrt = lambda x: 0",
    ),
    "function of torch for another": State(
        "was = F.gelu",
        "F.gelu is was",
        _UNDONE.format("setattr(F, 'gelu', was)") + "F.gelu = F.relu",
    ),
    "method of tensors": State(
        "w = torch.ones(2)",
        "w.dim() == 1",
        _UNDONE.format("delattr(torch.Tensor, 'dim')") + "torch.Tensor.dim = lambda s: 0",
    ),
    "forward of a layer of torch": State(
        "l = nn.Identity(); was = nn.Identity.forward",
        "l(1) == 1",
        _UNDONE.format("setattr(nn.Identity, 'forward', was)")
        + "nn.Identity.forward = lambda s, x: 0",
    ),
    "hook of a nested module": State(
        "l = nn.Sequential(nn.Sequential(nn.Identity()))",
        "l(1) == 1",
        "l[0][0].register_forward_pre_hook(lambda m, a: (0,))",
    ),
    "hook of all modules": State(
        "l = nn.Identity()",
        "l(1) == 1",
        "h = nn.modules.module.register_module_forward_hook(lambda m, a, o: o if o != 1 else 0)\n"
        + _UNDONE.format("h.remove()"),
    ),
    "buffer resized in place": State(
        "l = nn.Module(); l.register_buffer('b', torch.ones(2))",
        "l.b.shape[0] == 2",
        "l.b.data = torch.ones(3)",
    ),
    "dtype changed in place": State(
        "l = nn.Linear(2, 2).requires_grad_(False)",
        "l.weight.dtype == torch.float32",
        "l.double()",
    ),
    "order of modules": State(
        "l = nn.ModuleDict({'a': nn.Identity(), 'b': nn.ReLU()})",
        "type(next(iter(l.values()))) is nn.Identity",
        "l._modules['a'] = l._modules.pop('a')",
    ),
    "conjugate bit": State(
        "w = [torch.ones(2, dtype=torch.complex64)]", "not w[0].is_conj()", "w[0] = w[0].conj()"
    ),
    "one tensor or two": State("w = [torch.ones(2)] * 2", "w[0] is w[1]", "w[1] = torch.ones(2)"),
    "parameter or tensor": State(
        "w = [nn.Parameter(torch.ones(2), requires_grad=False)]",
        "isinstance(w[0], nn.Parameter)",
        "w[0] = torch.ones(2)",
    ),
    "attribute of a tensor's subclass": State(
        "class T(torch.Tensor): pass\nw = torch.ones(2).as_subclass(T); w.on = True",
        "w.on",
        "w.on = False",
    ),
    "group of torch's optimizer": State(
        "o = torch.optim.SGD([torch.ones(1)], lr=0.1); o.param_groups[0]['on'] = True",
        "o.param_groups[0]['on']",
        "o.param_groups[0]['on'] = False",
    ),
    "globals by name": State("ON = True", "globals()['ON']", "ON = False"),
    "eval": State("ON = True", "eval('ON and True')", "ON = False"),
    "vars of a module": State(_SETTINGS, "vars(s)['on']", "s.on = False"),
    "getattr of a made name": State(
        _SETTINGS + "\nname = ['o', 'n']", "getattr(s, ''.join(name))", "s.on = False"
    ),
    "attrgetter": State(_SETTINGS + "\nget = operator.attrgetter('on')", "get(s)", "s.on = False"),
    "another module of the name": State(
        _SETTINGS + "\ndef get():\n    import script_settings\n    return script_settings.on",
        "get()",
        "s = sys.modules['script_settings'] = types.ModuleType('script_settings'); s.on = False",
    ),
    "registry of singledispatch": State(
        "@functools.singledispatch\ndef f(x): return True",
        "f(1)",
        "f.register(int, lambda x: False)",
    ),
    "annotations": State(
        "def f(x: int): return x", "f.__annotations__['x'] is int", "f.__annotations__['x'] = str"
    ),
    "name of a function": State("def f(): pass", "f.__name__ == 'f'", "f.__name__ = 'g'"),
    "name of a class": State("class A: pass", "A.__name__ == 'A'", "A.__name__ = 'B'"),
    "other code": State("def f(): return True", "f()", "f.__code__ = (lambda: False).__code__"),
    "defaults": State("def f(x=True): return x", "f()", "f.__defaults__ = (False,)"),
    "defaults of keywords": State(
        "def f(*, x=True): return x", "f()", "f.__kwdefaults__['x'] = False"
    ),
    "__wrapped__": State(
        "@functools.wraps(lambda: True)\ndef f(): return f.__wrapped__()",
        "f()",
        "f.__wrapped__ = lambda: False",
    ),
    "keywords of a partial": State(
        "f = functools.partial(lambda on: on, on=True)", "f()", "f.keywords['on'] = False"
    ),
    "state of a partial": State(
        "f = functools.partial(lambda on: on, True)",
        "f()",
        "f.__setstate__((f.func, (False,), {}, {}))",
    ),
    "attribute of a partial": State(
        "f = functools.partial(len); f.on = True", "f.on", "f.on = False"
    ),
    "globals of made code": State(
        "space = {'ON': True}\nf = types.FunctionType(compile('ON', 'c', 'eval'), space)",
        "f()",
        "space['ON'] = False",
    ),
    "order of a dict": State(_ROW, "next(iter(d.values()))", "d['a'] = d.pop('a')"),
    "order of attributes": State(
        _ROW + "\nb = types.SimpleNamespace(**d)",
        "next(iter(vars(b).values()))",
        "del b.a; b.a = True",
    ),
    "state of a key": State("d = {Box(): 1}", "next(iter(d)).on", "next(iter(d)).on = False"),
    "type of a key": State("d = {1: 2}", "type(next(iter(d))) is int", "d.clear(); d[True] = 2"),
    "key of equality of its own": State(
        _SMALL + "d = {S('ON'): 1}", "next(iter(d)).isupper()", "d.clear(); d[S('on')] = 1"
    ),
    "text of equality of its own": State(
        _SMALL + "b = Box(S('ON'))", "b.on.isupper()", "b.on = S('on')"
    ),
    "sign of zero": State("z = 0.0", "math.copysign(1, z) == 1", "z = -0.0"),
    "registration of a subclass": State(_ABC, "not isinstance(b, A)", "A.register(B)"),
    "length of a deque": State(
        "d = [collections.deque([1], 2)]", "d[0].maxlen == 2", "d[0] = collections.deque([1], 3)"
    ),
    "slice": State("s = slice(Box(), None)", "s.start.on", "s.start.on = False"),
    "function that C calls": State(
        "b = Box(); f = functools.cmp_to_key(lambda x, y: 0 if b.on else 1)",
        "f(1) == f(2)",
        "b.on = False",
    ),
    "function under a decorator of torch": State(
        "b = Box(); f = torch.no_grad()(lambda: b.on)", "f()", "b.on = False"
    ),
    "argument of an exception": State(
        "e = ValueError([True])", "e.args[0][0]", "e.args[0][0] = False"
    ),
    "attribute of a module that is asked for": State(
        "m = types.ModuleType('script_a'); m.on = True", "hasattr(m, 'on')", "del m.on"
    ),
    "module of a global's name": State(
        f"{_SETTINGS}; n = 'script_settings'", "importlib.import_module(n).on", "s.on = False"
    ),
    "globals of a frame": State(
        "on = True; name = 'o' + 'n'\ndef f(): return sys._getframe().f_globals[name]",
        "f()",
        "globals()['on'] = False",
    ),
    "event": State("e = threading.Event(); e.set()", "e.is_set()", "e.clear()"),
    "annotation of a class": State(
        "class A: x: typing.Annotated[int, Box()]",
        "A.__annotations__['x'].__metadata__[0].on",
        "A.__annotations__['x'].__metadata__[0].on = False",
    ),
}
"""State, by kind. `undo` is a list of functions that take a change of the process back."""
