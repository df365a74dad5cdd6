//! What graphs become when they are launched.

use super::super::program::{Action, Program};
use super::*;

fn program(graph: CUgraph) -> Program {
    Program::new(&book(), GraphKey(graph as usize), 0).unwrap()
}

#[test]
fn kernels_alone_are_one_operation_and_the_host_comes_between() {
    trial::on_node(|| {
        let bench = Bench::new();
        let graph = bench.graph();
        let first = bench.kernel(graph, &[], "busy_1us", 1);
        let second = bench.kernel(graph, &[first], "busy_1us", 1);
        let alone = program(graph);
        assert!(
            matches!(&alone.steps[..], [step] if matches!(&step.action, Action::Kernels(all) if all.len() == 2))
        );
        let call = host(graph, &[first], 1);
        bench.kernel(graph, &[call], "busy_1us", 1);
        // What does not wait for the host goes before it.
        let kinds: Vec<usize> = program(graph)
            .steps
            .iter()
            .map(|step| match &step.action {
                Action::Kernels(all) => all.len(),
                _ => 0,
            })
            .collect();
        assert_eq!(kinds, [2, 0, 1]);
        let _ = second;
        assert!(program(bench.graph()).steps.is_empty());
    });
}
