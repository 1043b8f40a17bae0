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
    "class of an object": State("b = Box()", "b.on", "b.__dict__.clear(); b.__class__ = Other"),
    "class of an object without data": State(_CLASS, "b.on", "b.__class__ = Other"),
    "class of a module": State(
        "class A(nn.Module):\n    on = True\nclass B(nn.Module): on = False\n"
        "s = nn.Sequential(A())",
        "s[0].on",
        "s[0].__class__ = B",
    ),
    "class of a tensor": State(
        "class T(torch.Tensor): on = False\nnn.Parameter.on = True\n"
        "p = nn.Parameter(torch.ones(2))",
        "p.on",
        "p.__class__ = T; undo.append(lambda: delattr(nn.Parameter, 'on'))",
    ),
    "class of a class": State(
        "class M(type): on = True\nclass N(type): on = False\nclass A(metaclass=M): pass",
        "A.on",
        "A.__class__ = N",
    ),
    "bases of a class": State(
        "class A: on = True\nclass C: on = False\nclass B(A): pass\nb = B()",
        "b.on",
        "B.__bases__ = (C,)",
    ),
    "order of a table": State(
        "t = collections.OrderedDict(a=True, b=False)",
        "next(iter(t.values()))",
        "t.move_to_end('a')",
    ),
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
    "frozen dataclass": State(
        "@dataclasses.dataclass(frozen=True)\nclass A: on: bool = True\na = A()",
        "a.on",
        "object.__setattr__(a, 'on', False)",
    ),
    "member of an enum": State(
        "class E(enum.Enum): ON = 1\nE.ON.flag = True", "E.ON.flag", "E.ON.flag = False"
    ),
    "attribute of a cached function": State(
        "@functools.lru_cache\ndef f(): return 1\nf.on = True", "f.on", "f.on = False"
    ),
    "__missing__ of a dict": State(
        "class D(dict):\n    def __missing__(self, key): return True\nd = D()",
        "d['on']",
        "D.__missing__ = lambda s, k: False",
    ),
    "hook of a nested module": State(
        "l = nn.Sequential(nn.Sequential(nn.Identity()))",
        "l(1) == 1",
        "l[0][0].register_forward_pre_hook(lambda m, a: (0,))",
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
    "dict in a class": State(
        "class A: names = {'on': True}", "A.names['on']", "A.names['on'] = False"
    ),
    "set": State("d = {'on'}", "'on' in d", "d.discard('on')"),
    "attribute of a dict's subclass": State(
        "class D(dict): pass\nd = D(); d.on = True", "d.on", "d.on = False"
    ),
    "method of a number's subclass": State(
        "def f(on=True): return on\nclass N(int):\n    def get(self): return f()\nn = N(3)",
        "n.get()",
        "f.__defaults__ = (False,)",
    ),
    "namespace of argparse": State(
        "import argparse; n = argparse.Namespace(on=True)", "n.on", "n.on = False"
    ),
    "item of a deque": State("d = collections.deque([True])", "d[0]", "d[0] = False"),
    "mode of a module": State("l = nn.Dropout(0.0)", "l.training", "l.eval()"),
    "attribute of a parameter": State(
        "w = nn.Parameter(torch.ones(2)); w.on = True", "vars(w)['on']", "w.on = False"
    ),
    "attribute of a parameter that was missing": State(
        "w = nn.Parameter(torch.ones(2))", "not hasattr(w, 'stop')", "w.stop = True"
    ),
    "attribute of a function that was missing": State(
        "def f(): return getattr(f, 'on', True)", "f()", "f.on = False"
    ),
    "module that code imports": State(
        _SETTINGS + "\ndef f():\n    import script_settings\n    return script_settings.on",
        "f()",
        "s.on = False",
    ),
    "name that code imports": State(
        _SETTINGS + "\ndef f():\n    from script_settings import on\n    return on",
        "f()",
        "s.on = False",
    ),
    "module in a default": State(_SETTINGS + "\ndef f(s=s): return s.on", "f()", "s.on = False"),
    "global named like a builtin": State("abs = True", "abs", "abs = False"),
    "global that was missing": State(
        "def f():\n    try: return later\n    except NameError: return True",
        "f()",
        "later = False",
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
    "vars of a module": State(_SETTINGS, "vars(s)['on']", "s.on = False"),
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
    "length of a deque": State(
        "d = [collections.deque([1], 2)]", "d[0].maxlen == 2", "d[0] = collections.deque([1], 3)"
    ),
    "function under a decorator of torch": State(
        "b = Box(); f = torch.no_grad()(lambda: b.on)", "f()", "b.on = False"
    ),
    "attribute of a module that is asked for": State(
        "m = types.ModuleType('script_a'); m.on = True", "hasattr(m, 'on')", "del m.on"
    ),
}
"""State, by kind. `undo` is a list of functions that take a change of the process back."""
