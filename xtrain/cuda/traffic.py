"""What a captured graph copies from the device to the host, read off its nodes."""

from cuda.bindings import runtime


def bytes_to_host(graph) -> int:
    """Bytes of the device-to-host copies in a CuPy graph; graphs within it are followed."""
    return _of_nodes(runtime.cudaGraph_t(graph.graph))


def _of_nodes(graph) -> int:
    _, count = _checked(runtime.cudaGraphGetNodes(graph))
    nodes, count = _checked(runtime.cudaGraphGetNodes(graph, count))
    return sum(map(_of_node, nodes[:count]))


def _of_node(node) -> int:
    kinds = runtime.cudaGraphNodeType
    (kind,) = _checked(runtime.cudaGraphNodeGetType(node))
    if kind == kinds.cudaGraphNodeTypeGraph:
        return _of_nodes(*_checked(runtime.cudaGraphChildGraphNodeGetGraph(node)))
    if kind != kinds.cudaGraphNodeTypeMemcpy:
        return 0
    (copy,) = _checked(runtime.cudaGraphMemcpyNodeGetParams(node))
    if not _ends_on_host(copy):
        return 0
    return copy.extent.width * copy.extent.height * copy.extent.depth


def _ends_on_host(copy) -> bool:
    kinds, places = runtime.cudaMemcpyKind, runtime.cudaMemoryType
    if copy.kind != kinds.cudaMemcpyDefault:
        return copy.kind == kinds.cudaMemcpyDeviceToHost
    (target,) = _checked(runtime.cudaPointerGetAttributes(copy.dstPtr.ptr))
    return target.type in (places.cudaMemoryTypeHost, places.cudaMemoryTypeUnregistered)


def _checked(answer: tuple) -> tuple:
    error, *values = answer
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"the graph cannot be read: {error.name}")
    return tuple(values)
