"""What a launch command would build, read from SGLang's own classes, with no GPU and no weights.

`child` runs them in a process of its own, once for each SGLang tree: the argument parser and its
resolution (`arguments`), then the configurators, pools and allocator of target and draft
(`pools`), whose tensors have a shape and no bytes. `verdict` says what it came to; `show` and `svg`
draw it.
"""
