//! Memory oversubscription: an annotation asks for it, and the node's settings allow or refuse it.

use crate::stage::{Stage, bed, pod};
use partage_testkit::agent::SETTINGS;

const LIMITS: &str = "partage.dev/gpu: 1, partage.dev/memory: 2Gi";

fn annotated(name: &str, value: &str) -> String {
    let annotations = format!("annotations: {{partage.dev/oversubscribe: \"{value}\"}}");
    pod(name, LIMITS, "sleep 1000")
        .replace(&format!("{{name: {name}}}"), &format!("{{name: {name}, {annotations}}}"))
}

/// A program that allocates more than [`LIMITS`].
const LARGE: &str = "/programs/partage-sample trainer --memory 3Gi --seconds 0.2";

#[test]
fn annotation_is_refused_unless_the_node_allows_it_and_survives_a_restart_of_the_agent() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut stage = Stage::set(&bed, SETTINGS).await;
        stage.apply(&annotated("beyond", "true"));
        let said = stage.waits("beyond", "node node1 refuses memory beyond the limit").await;
        assert!(said.contains("remove the annotation"), "{said}");
        stage.apply(&annotated("wrong", "yes"));
        stage.waits("wrong", "\"yes\" is not a boolean").await;
        stage.delete("wrong");
        stage.keeps([0, 0, 0]).await;

        // The pod that was refused starts by itself once the settings allow it.
        stage.agent.write_settings(&format!("{SETTINGS}oversubscribe: allowed\n")).unwrap();
        stage.runs("beyond").await;
        let said = stage.exec("beyond", LARGE).unwrap();
        assert!(said.contains("the model takes 3.0 GiB"), "{said}");
        stage.apply(&pod("within", LIMITS, "sleep 1000"));
        stage.runs("within").await;
        let said = stage.exec("within", LARGE).unwrap_err();
        assert!(said.contains("out of memory: the model takes 3.0 GiB"), "{said}");

        // Settings that refuse it again are for pods that start; the agent that starts with them leaves this one what it has.
        stage.agent.write_settings(SETTINGS).unwrap();
        stage.start_again().await;
        stage.exec("beyond", LARGE).unwrap();
        assert_eq!(stage.metric("partage_bypass_total").unwrap(), 0.0, "{}", stage.agent.log());
    });
}
