//! Tests of the plans that graphs are launched with.

use super::super::launch_plan::{LaunchPlan, StepAction};
use super::*;

fn plan_of(graph: CUgraph) -> LaunchPlan {
    LaunchPlan::new(&store(), GraphKey(graph as usize), 0).unwrap()
}

#[test]
fn consecutive_kernels_form_one_step_split_by_host_work() {
    test_node::run(|| {
        let fixture = GraphFixture::new();
        let graph = fixture.graph();
        let first = fixture.kernel(graph, &[], "busy_1us", 1);
        let second = fixture.kernel(graph, &[first], "busy_1us", 1);
        let alone = plan_of(graph);
        assert!(
            matches!(&alone.steps[..], [step] if matches!(&step.action, StepAction::Kernels(all) if all.len() == 2))
        );
        let call = host(graph, &[first], 1);
        fixture.kernel(graph, &[call], "busy_1us", 1);
        // Kernels that do not wait for the host are placed before the host work.
        let kinds: Vec<usize> = plan_of(graph)
            .steps
            .iter()
            .map(|step| match &step.action {
                StepAction::Kernels(all) => all.len(),
                _ => 0,
            })
            .collect();
        assert_eq!(kinds, [2, 0, 1]);
        let _ = second;
        assert!(plan_of(fixture.graph()).steps.is_empty());
    });
}
