//! Memory oversubscription: an annotation requests it, and the node's settings allow or refuse it.

use crate::test_node::{TestNode, bed, pod};
use partage_testkit::agent::SIMULATED_SETTINGS;

const LIMITS: &str = "partage.dev/gpu: 1, partage.dev/memory: 2Gi";

fn oversubscribed_pod(name: &str, value: &str) -> String {
    let annotations = format!("annotations: {{partage.dev/oversubscribe: \"{value}\"}}");
    pod(name, LIMITS, "sleep 1000")
        .replace(&format!("{{name: {name}}}"), &format!("{{name: {name}, {annotations}}}"))
}

/// A program that allocates more than [`LIMITS`].
const OVERSIZED_PROGRAM: &str = "/programs/partage-sample trainer --memory 3Gi --seconds 0.2";

#[test]
fn annotation_is_refused_unless_the_node_allows_it_and_survives_a_restart_of_the_agent() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        test_node.apply(&oversubscribed_pod("beyond", "true"));
        let output = test_node.wait_until_waiting("beyond", "node node1 does not allow").await;
        assert!(output.contains("remove the annotation"), "{output}");
        test_node.apply(&oversubscribed_pod("wrong", "yes"));
        test_node.wait_until_waiting("wrong", "\"yes\" is not a boolean").await;
        test_node.delete_pod("wrong");
        test_node.wait_for_agent_files([0, 0, 0]).await;

        // The refused pod starts by itself once the settings allow it.
        test_node.agent.write_settings(&format!("{SIMULATED_SETTINGS}oversubscribe: allowed\n")).unwrap();
        test_node.wait_until_running("beyond").await;
        let output = test_node.exec("beyond", OVERSIZED_PROGRAM).unwrap();
        assert!(output.contains("the model takes 3.0 GiB"), "{output}");
        test_node.apply(&pod("within", LIMITS, "sleep 1000"));
        test_node.wait_until_running("within").await;
        let output = test_node.exec("within", OVERSIZED_PROGRAM).unwrap_err();
        assert!(output.contains("out of memory: the model takes 3.0 GiB"), "{output}");

        // Settings that refuse it again apply to pods that start later; an agent that starts with them leaves this pod
        // unchanged.
        test_node.agent.write_settings(SIMULATED_SETTINGS).unwrap();
        test_node.restart_agent().await;
        test_node.exec("beyond", OVERSIZED_PROGRAM).unwrap();
        assert_eq!(test_node.metric_sum("partage_bypass_total").unwrap(), 0.0, "{}", test_node.agent.log());
    });
}
