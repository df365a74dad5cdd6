//! Renders a graph in Graphviz's DOT language.

use super::node_operation::NodeOperation;
use super::store::{GraphKey, GraphStore};
use super::*;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Returns the DOT text of a graph; `flags` select the details of each node.
pub(super) fn render(store: &GraphStore, graph: GraphKey, flags: u32) -> Result<String, CudaError> {
    let mut out = String::from("digraph dot {\n");
    write_subgraph(store, graph, flags, &mut out, &mut 0)?;
    out.push_str("}\n");
    Ok(out)
}

fn write_subgraph(
    store: &GraphStore,
    key: GraphKey,
    flags: u32,
    out: &mut String,
    number: &mut usize,
) -> Result<(), CudaError> {
    *number += 1;
    let (own, graph) = (*number, store.graph(key)?);
    let numbers: BTreeMap<NodeKey, usize> = graph.nodes.iter().copied().zip(0..).collect();
    let name = |node: &NodeKey| format!("graph_{own}_node_{}", numbers.get(node).unwrap_or(&0));
    // Writing to a string does not fail.
    let _ = writeln!(out, "subgraph cluster_{own} {{\nlabel=\"graph_{own}\";");
    for key in &graph.nodes {
        let node = store.node(*key)?;
        let mut text = label(&node.operation, flags);
        if flags & (CU_GRAPH_DEBUG_DOT_FLAGS_HANDLES | CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE) != 0 {
            let _ = write!(text, "\\n{:#x}", key.0);
        }
        let _ = writeln!(out, "\"{}\" [shape=\"box\" label=\"{text}\"];", name(key));
    }
    for (from, to, _) in store.edges(key)? {
        let _ = writeln!(out, "\"{}\" -> \"{}\";", name(&from), name(&to));
    }
    let children =
        graph.nodes.iter().filter_map(|node| match store.node(*node).map(|node| &node.operation) {
            Ok(NodeOperation::Child(child)) => Some(*child),
            _ => None,
        });
    for child in children {
        write_subgraph(store, child, flags, out, number)?;
    }
    out.push_str("}\n");
    Ok(())
}

fn label(operation: &NodeOperation, flags: u32) -> String {
    let all = flags & CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE != 0;
    match operation {
        NodeOperation::Empty => "EMPTY".into(),
        NodeOperation::Kernel(kernel) => {
            let name = kernel.function.name.to_string_lossy().replace(['"', '\\'], "_");
            if all || flags & CU_GRAPH_DEBUG_DOT_FLAGS_KERNEL_NODE_PARAMS != 0 {
                let shape = kernel.shape;
                format!("KERNEL\\n{name}\\n{:?} x {:?}, {}", shape.grid, shape.block, shape.shared)
            } else {
                format!("KERNEL\\n{name}")
            }
        }
        NodeOperation::Copy(_, params, _) => {
            let size = params.0;
            format!("MEMCPY\\n{} x {} x {}", size.WidthInBytes, size.Height, size.Depth)
        }
        NodeOperation::Fill(_, params, _) => format!("MEMSET\\n{} x {}", params.width, params.height),
        NodeOperation::Host(_) => "HOST".into(),
        NodeOperation::Child(_) => "GRAPH".into(),
        NodeOperation::Record(_) => "EVENT_RECORD".into(),
        NodeOperation::Wait(_) => "WAIT_EVENT".into(),
        NodeOperation::Alloc(allocation) => format!("MEM_ALLOC\\n{:#x}", allocation.pointer()),
        NodeOperation::Free(pointer) => format!("MEM_FREE\\n{pointer:#x}"),
    }
}
