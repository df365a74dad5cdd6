//! `partage explain`: explains why a pod does not fit a cluster, and suggests what would make it fit.

use super::{CommandExit, DialectArgs, OutputFormat, check, write_error};
use crate::manifest_files::{self, ManifestInput};
use crate::output::write_line;
use anyhow::{Context, anyhow};
use clap::Args;
use partage_core::check::WorkloadReport;
use partage_core::cluster_file::ClusterFile;
use partage_core::explain::{ClosestNode, Explanation};
use partage_core::ledger::{HeldGrant, Ledger, Snapshot};
use partage_core::manifest::WorkloadManifest;
use partage_core::model::{PlacementPolicy, PodGrant};
use partage_core::place::{HostUsage, PolicyEngine, RankCache, defaults};
use serde_json::{Value, json};
use std::io::{self, Write};
use std::path::PathBuf;

/// Explain why a pod does not fit a cluster
///
/// The cluster is a snapshot file with nodes, GPUs and grants (see docs/snapshot.md). Placement uses the same code as the node agent.
/// Each workload is placed separately, as one pod in addition to the grants of the snapshot.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ExplainCommand {
    /// Manifest in YAML or JSON, - for standard input; can be repeated
    #[arg(short, long = "file", value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// Cluster snapshot in JSON
    #[arg(long, value_name = "FILE")]
    cluster: PathBuf,

    /// Placement policy for pods that do not choose one: fragmentation, binpack, spread or topology
    #[arg(long, default_value_t = defaults::CLUSTER_POLICY)]
    policy: PlacementPolicy,

    /// List every node that does not fit, with the shortfall of its GPUs
    #[arg(long)]
    per_node: bool,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = OutputFormat::Table)]
    output: OutputFormat,

    #[command(flatten)]
    dialects: DialectArgs,
}

const EXAMPLES: &str = "\
Examples:
  partage explain -f pod.yaml --cluster cluster.json
  partage explain -f pod.yaml --cluster cluster.json --per-node
  partage explain -f pod.yaml --cluster cluster.json -o json

Exit code: 0 everything fits, 1 a workload does not fit or has problems, 2 a file is unreadable";

/// The result for one workload.
struct WorkloadExplanation {
    report: WorkloadReport,
    /// Absent if no GPU is requested, or if a problem makes the request unclear.
    explanation: Option<Explanation>,
    /// The placement, if the workload fits.
    grant: Option<PodGrant>,
}

impl WorkloadExplanation {
    fn fits(&self) -> bool {
        self.report.problems.is_empty() && self.explanation.as_ref().is_none_or(|e| !e.fitting.is_empty())
    }
}

impl ExplainCommand {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        let (input, cluster) = self.read();
        for error in input.unread_gpu_requests.iter().chain(&input.unreadable) {
            write_line(err, format_args!("error: {error}"))?;
        }
        let cluster = match cluster {
            Ok(cluster) => cluster,
            Err(error) => {
                write_error(err, &error)?;
                // JSON is written even if the cluster cannot be read.
                if matches!(self.output, OutputFormat::Json) {
                    write_json(&self.to_json(&[], &[]), out)?;
                }
                return Ok(CommandExit::InputError);
            }
        };
        let held = cluster.grants.into_iter().map(|held| {
            let host = HostUsage::new(held.cpu_milli, held.memory_bytes);
            (held.pod, held.grant, host)
        });
        let ledger = Ledger::rebuild(cluster.nodes, held);
        let findings: Vec<String> = ledger.audit().iter().map(ToString::to_string).collect();
        let mut policies = PolicyEngine::new(self.policy);
        // The running pods are the best estimate of future demand.
        let held: Vec<_> = ledger.all_held().map(HeldGrant::to_ask).collect();
        policies.learn(&held, ledger.cluster());
        let snapshot = ledger.snapshot();
        let results: Vec<WorkloadExplanation> =
            input.workloads.iter().map(|workload| self.explain(workload, &snapshot, &policies)).collect();
        match self.output {
            OutputFormat::Json => {
                write_json(&self.to_json(&results, &findings), out)?;
            }
            OutputFormat::Table => {
                for finding in &findings {
                    write_line(err, format_args!("warning: {finding}"))?;
                }
                for result in &results {
                    self.write_table(result, out)?;
                }
            }
        }
        let all_fit = results.iter().all(WorkloadExplanation::fits);
        Ok(if !input.unreadable.is_empty() {
            CommandExit::InputError
        } else if all_fit && input.unread_gpu_requests.is_empty() {
            CommandExit::Success
        } else {
            CommandExit::ProblemsFound
        })
    }

    /// Reads the workloads and the cluster.
    fn read(&self) -> (ManifestInput, anyhow::Result<ClusterFile>) {
        let is_input = |file: &PathBuf| file.as_os_str() == "-";
        if is_input(&self.cluster) && self.files.iter().any(is_input) {
            let error =
                "standard input cannot be both the manifest and the cluster: use a file for one of them";
            return (ManifestInput::default(), Err(anyhow!(error)));
        }
        let cluster = manifest_files::read_text(&self.cluster)
            .map_err(anyhow::Error::from)
            .and_then(|text| Ok(ClusterFile::from_json(&text)?))
            .with_context(|| self.cluster.display().to_string());
        (manifest_files::read_manifests(&self.files), cluster)
    }

    fn explain(
        &self,
        workload: &WorkloadManifest,
        snapshot: &Snapshot,
        policies: &PolicyEngine,
    ) -> WorkloadExplanation {
        let settings = self.dialects.settings();
        let (report, ask) = WorkloadReport::with_ask(workload, &settings);
        // If the request of one container is unclear, the pod would be placed for less than it needs.
        if ask.asks.is_empty() || report.containers.iter().any(|container| container.unclear) {
            return WorkloadExplanation { report, explanation: None, grant: None };
        }
        let decision = snapshot.best(policies, &ask, &mut RankCache::default());
        let cluster = snapshot.cluster();
        let grant = decision
            .map(|decision| decision.placement.grant(&ask.asks, cluster.node_capacity(decision.node)));
        WorkloadExplanation { report, explanation: Some(snapshot.explain(&ask)), grant }
    }

    fn write_table(&self, result: &WorkloadExplanation, out: &mut dyn Write) -> io::Result<()> {
        check::write_workload(&result.report, out)?;
        let Some(explanation) = &result.explanation else {
            if result.report.problems.is_empty() {
                write_line(out, format_args!("  requests no GPU: nothing to explain"))?;
            }
            return Ok(());
        };
        write_line(out, format_args!("  {}", explanation.summary()))?;
        if let Some(grant) = &result.grant {
            for container in &grant.grants {
                let gpus: Vec<&str> = container.shares.iter().map(|share| share.gpu.as_str()).collect();
                write_line(
                    out,
                    format_args!(
                        "  {} would be placed on {}: {}",
                        container.container,
                        grant.node,
                        gpus.join(", ")
                    ),
                )?;
            }
        }
        for suggestion in &explanation.suggestions {
            write_line(out, format_args!("  try: {suggestion}"))?;
        }
        if self.per_node {
            for node in &explanation.per_node {
                write_line(out, format_args!("  {}: {}", node.node, node.text))?;
            }
        }
        Ok(())
    }

    fn to_json(&self, results: &[WorkloadExplanation], findings: &[String]) -> Value {
        let results: Vec<Value> = results
            .iter()
            .map(|result| {
                let explanation = result.explanation.as_ref();
                let mut json = json!({
                    "kind": result.report.kind,
                    "namespace": result.report.namespace,
                    "name": result.report.name,
                    "fits": result.fits(),
                    "problems": result.report.problems,
                    "nodes": explanation.map(|e| e.nodes),
                    "fittingNodes": explanation.map(|e| e.fitting.len()),
                    "placement": result.grant,
                    "summary": explanation.map(Explanation::summary),
                    "reasons": explanation.map(reasons),
                    "suggestions": explanation.map(|e| e.suggestions.iter().map(|s| json!({
                        "text": s.to_string(),
                        "node": s.node,
                    })).collect::<Vec<_>>()),
                });
                if let (true, Some(explanation)) = (self.per_node, explanation) {
                    json["perNode"] = per_node(explanation);
                }
                json
            })
            .collect();
        json!({ "workloads": results, "findings": findings })
    }
}

fn write_json(json: &Value, out: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, json)?;
    writeln!(out)
}

fn reasons(explanation: &Explanation) -> Vec<Value> {
    let closest = |closest: &ClosestNode| json!({ "node": closest.node, "gpu": closest.gpu, "has": closest.has.to_string(), "amount": closest.has.amount() });
    let reason = |reason: &partage_core::explain::NoFitReason| {
        json!({
            "cause": reason.cause.name(),
            "nodes": reason.nodes,
            "text": reason.text,
            "closest": reason.closest.as_ref().map(closest),
        })
    };
    explanation.reasons.iter().map(reason).collect()
}

fn per_node(explanation: &Explanation) -> Value {
    let nodes = explanation.per_node.iter().map(|node| {
        let gpus: Vec<Option<String>> = node.gpus.iter().map(|short| short.map(|s| s.to_string())).collect();
        json!({ "node": node.node, "cause": node.cause.name(), "text": node.text, "gpus": gpus })
    });
    nodes.collect()
}
