"""Tensors, the tape, declared ops and flat parameter buffers: everything a model is made of.

The engine knows nothing of kernels, CUDA, configuration or tracking; `xtrain.cpu` and
`xtrain.cuda` plug themselves into the ops it declares.
"""
