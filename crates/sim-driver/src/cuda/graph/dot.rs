//! A graph as a picture: the language of Graphviz.

use super::book::{Book, GraphKey};
use super::work::Work;
use super::*;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The text for a graph. `flags`: what is said of each node.
pub(super) fn text(book: &Book, graph: GraphKey, flags: u32) -> Result<String, CudaError> {
    let mut out = String::from("digraph dot {\n");
    part(book, graph, flags, &mut out, &mut 0)?;
    out.push_str("}\n");
    Ok(out)
}

fn part(
    book: &Book,
    key: GraphKey,
    flags: u32,
    out: &mut String,
    number: &mut usize,
) -> Result<(), CudaError> {
    *number += 1;
    let (own, graph) = (*number, book.graph(key)?);
    let numbers: BTreeMap<NodeKey, usize> = graph.nodes.iter().copied().zip(0..).collect();
    let name = |node: &NodeKey| format!("graph_{own}_node_{}", numbers.get(node).unwrap_or(&0));
    // Writing to a string does not fail.
    let _ = writeln!(out, "subgraph cluster_{own} {{\nlabel=\"graph_{own}\";");
    for key in &graph.nodes {
        let node = book.node(*key)?;
        let mut label = words(&node.work, flags);
        if flags & (CU_GRAPH_DEBUG_DOT_FLAGS_HANDLES | CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE) != 0 {
            let _ = write!(label, "\\n{:#x}", key.0);
        }
        let _ = writeln!(out, "\"{}\" [shape=\"box\" label=\"{label}\"];", name(key));
    }
    for (from, to, _) in book.edges(key)? {
        let _ = writeln!(out, "\"{}\" -> \"{}\";", name(&from), name(&to));
    }
    let children = graph.nodes.iter().filter_map(|node| match book.node(*node).map(|node| &node.work) {
        Ok(Work::Child(child)) => Some(*child),
        _ => None,
    });
    for child in children {
        part(book, child, flags, out, number)?;
    }
    out.push_str("}\n");
    Ok(())
}

fn words(work: &Work, flags: u32) -> String {
    let all = flags & CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE != 0;
    match work {
        Work::Empty => "EMPTY".into(),
        Work::Kernel(kernel) => {
            let name = kernel.function.name.to_string_lossy().replace(['"', '\\'], "_");
            if all || flags & CU_GRAPH_DEBUG_DOT_FLAGS_KERNEL_NODE_PARAMS != 0 {
                let shape = kernel.shape;
                format!("KERNEL\\n{name}\\n{:?} x {:?}, {}", shape.grid, shape.block, shape.shared)
            } else {
                format!("KERNEL\\n{name}")
            }
        }
        Work::Copy(_, params, _) => {
            let size = params.0;
            format!("MEMCPY\\n{} x {} x {}", size.WidthInBytes, size.Height, size.Depth)
        }
        Work::Fill(_, params, _) => format!("MEMSET\\n{} x {}", params.width, params.height),
        Work::Host(_) => "HOST".into(),
        Work::Child(_) => "GRAPH".into(),
        Work::Record(_) => "EVENT_RECORD".into(),
        Work::Wait(_) => "WAIT_EVENT".into(),
        Work::Alloc(allocation) => format!("MEM_ALLOC\\n{:#x}", allocation.pointer()),
        Work::Free(pointer) => format!("MEM_FREE\\n{pointer:#x}"),
    }
}
