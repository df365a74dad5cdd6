//! `partage explain`: why a pod does not fit a cluster, and what would make it fit.

use super::{DialectArgs, Outcome, Output, check};
use crate::input::{self, Input};
use crate::output::line;
use clap::Args;
use partage_core::check::WorkloadReport;
use partage_core::cluster_file::ClusterFile;
use partage_core::explain::{Closest, Explanation};
use partage_core::ledger::{HeldGrant, Ledger, Snapshot};
use partage_core::manifest::Workload;
use partage_core::model::{PodGrant, Policy};
use partage_core::place::{HostUsage, PolicyEngine, RankCache, defaults};
use serde_json::{Value, json};
use std::io::{self, Write};
use std::path::PathBuf;

/// Say why a pod does not fit a cluster, and what would make it fit
///
/// The cluster is a snapshot file: nodes, GPUs and what pods hold (docs/snapshot.md describes it). The same
/// functions decide here and in the scheduler. Of several workloads each is judged alone, as one pod beside
/// what the snapshot holds.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Explain {
    /// A manifest, YAML or JSON; - is standard input; may be given several times
    #[arg(short, long = "file", value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// The cluster: a snapshot in JSON
    #[arg(long, value_name = "FILE")]
    cluster: PathBuf,

    /// The policy that would choose, where the pod names none: fragmentation, binpack, spread or topology
    #[arg(long, default_value_t = defaults::CLUSTER_POLICY)]
    policy: Policy,

    /// Show every node that does not fit, and what each of its GPUs is short of
    #[arg(long)]
    per_node: bool,

    /// How to answer
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,

    #[command(flatten)]
    dialects: DialectArgs,
}

const EXAMPLES: &str = "\
Examples:
  partage explain -f pod.yaml --cluster cluster.json
  partage explain -f pod.yaml --cluster cluster.json --per-node
  partage explain -f pod.yaml --cluster cluster.json -o json

Exit code: 0 everything fits, 1 something does not or is wrong, 2 unreadable";

/// One workload and what the cluster says to it.
struct Answer {
    report: WorkloadReport,
    /// Absent where nothing is asked, or a problem leaves unclear what.
    explanation: Option<Explanation>,
    /// Where it would go.
    grant: Option<PodGrant>,
}

impl Answer {
    fn fits(&self) -> bool {
        self.report.problems.is_empty() && self.explanation.as_ref().is_none_or(|e| !e.fitting.is_empty())
    }
}

impl Explain {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        let (input, cluster) = self.read();
        for what in input.unread.iter().chain(&input.unreadable).chain(cluster.as_ref().err()) {
            line(err, format_args!("error: {what}"))?;
        }
        let Ok(cluster) = cluster else {
            // A program gets JSON whatever happens.
            if matches!(self.output, Output::Json) {
                write_json(&self.json(&[], &[]), out)?;
            }
            return Ok(Outcome::Unreadable);
        };
        let held = cluster.grants.into_iter().map(|held| {
            let host = HostUsage::new(held.cpu_milli, held.memory_bytes);
            (held.pod, held.grant, host)
        });
        let ledger = Ledger::rebuild(cluster.nodes, held);
        let findings: Vec<String> = ledger.audit().iter().map(ToString::to_string).collect();
        let mut policies = PolicyEngine::new(self.policy);
        // What runs is the best guess at what will arrive.
        let held: Vec<_> = ledger.all_held().map(HeldGrant::to_ask).collect();
        policies.learn(&held, ledger.cluster());
        let snapshot = ledger.snapshot();
        let answers: Vec<Answer> =
            input.workloads.iter().map(|workload| self.answer(workload, &snapshot, &policies)).collect();
        match self.output {
            Output::Json => {
                write_json(&self.json(&answers, &findings), out)?;
            }
            Output::Table => {
                for finding in &findings {
                    line(err, format_args!("warning: {finding}"))?;
                }
                for answer in &answers {
                    self.table(answer, out)?;
                }
            }
        }
        Ok(match answers.iter().all(Answer::fits) {
            _ if !input.unreadable.is_empty() => Outcome::Unreadable,
            true if input.unread.is_empty() => Outcome::Fine,
            _ => Outcome::Problems,
        })
    }

    /// The workloads and the cluster.
    fn read(&self) -> (Input, Result<ClusterFile, String>) {
        let is_input = |file: &PathBuf| file.as_os_str() == "-";
        if is_input(&self.cluster) && self.files.iter().any(is_input) {
            let what =
                "standard input cannot be both the manifest and the cluster: name a file for one of them";
            return (Input::default(), Err(what.into()));
        }
        let cluster = input::text(&self.cluster)
            .and_then(|text| ClusterFile::from_json(&text).map_err(|error| error.to_string()))
            .map_err(|what| format!("{}: {what}", self.cluster.display()));
        (input::read(&self.files), cluster)
    }

    fn answer(&self, workload: &Workload, snapshot: &Snapshot, policies: &PolicyEngine) -> Answer {
        let settings = self.dialects.settings();
        let (report, ask) = WorkloadReport::with_ask(workload, &settings);
        // Where one container's ask is unclear, the pod would be judged for less than it wants.
        if ask.asks.is_empty() || report.containers.iter().any(|container| container.unclear) {
            return Answer { report, explanation: None, grant: None };
        }
        let decision = snapshot.best(policies, &ask, &mut RankCache::default());
        let cluster = snapshot.cluster();
        let grant = decision
            .map(|decision| decision.placement.grant(&ask.asks, cluster.node_capacity(decision.node)));
        Answer { report, explanation: Some(snapshot.explain(&ask)), grant }
    }

    fn table(&self, answer: &Answer, out: &mut dyn Write) -> io::Result<()> {
        check::workload(&answer.report, out)?;
        let Some(explanation) = &answer.explanation else {
            if answer.report.problems.is_empty() {
                line(out, format_args!("  asks for no GPU: nothing to explain"))?;
            }
            return Ok(());
        };
        line(out, format_args!("  {}", explanation.summary()))?;
        if let Some(grant) = &answer.grant {
            for container in &grant.grants {
                let gpus: Vec<&str> = container.shares.iter().map(|share| share.gpu.as_str()).collect();
                line(
                    out,
                    format_args!("  {} would go to {}: {}", container.container, grant.node, gpus.join(", ")),
                )?;
            }
        }
        for suggestion in &explanation.suggestions {
            line(out, format_args!("  try: {suggestion}"))?;
        }
        if self.per_node {
            for node in &explanation.per_node {
                line(out, format_args!("  {}: {}", node.node, node.text))?;
            }
        }
        Ok(())
    }

    fn json(&self, answers: &[Answer], findings: &[String]) -> Value {
        let answers: Vec<Value> = answers
            .iter()
            .map(|answer| {
                let explanation = answer.explanation.as_ref();
                let mut json = json!({
                    "kind": answer.report.kind,
                    "namespace": answer.report.namespace,
                    "name": answer.report.name,
                    "fits": answer.fits(),
                    "problems": answer.report.problems,
                    "nodes": explanation.map(|e| e.nodes),
                    "fittingNodes": explanation.map(|e| e.fitting.len()),
                    "placement": answer.grant,
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
        json!({ "workloads": answers, "findings": findings })
    }
}

fn write_json(json: &Value, out: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, json)?;
    writeln!(out)
}

fn reasons(explanation: &Explanation) -> Vec<Value> {
    let closest = |closest: &Closest| json!({ "node": closest.node, "gpu": closest.gpu, "has": closest.has.to_string(), "amount": closest.has.amount() });
    let reason = |reason: &partage_core::explain::Reason| {
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
