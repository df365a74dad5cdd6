//! The plain manifests in `deploy/`: the chart as helm renders it, for people who have no helm.

use crate::binaries::{self, Missing, Settings};
use crate::process::last_words;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The Kubernetes that they are rendered for. It decides nothing but whether the chart takes it.
const KUBERNETES: &str = "1.36.4";

/// One file of plain manifests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manifest {
    /// Agents for real GPUs.
    Real,
    /// Agents with simulated GPUs, to try things.
    Simulated,
    /// Agents that take back what agents have put on their nodes.
    Withdraw,
}

impl Manifest {
    /// Every file.
    pub const ALL: [Manifest; 3] = [Manifest::Real, Manifest::Simulated, Manifest::Withdraw];

    /// Where it is.
    pub fn path(self) -> PathBuf {
        deploy().join(match self {
            Manifest::Real => "partage.yaml",
            Manifest::Simulated => "partage-simulated.yaml",
            Manifest::Withdraw => "partage-withdraw.yaml",
        })
    }

    fn values(self) -> &'static [&'static str] {
        match self {
            Manifest::Real => &[],
            Manifest::Simulated => &["settings.driver=simulated"],
            Manifest::Withdraw => &["withdraw=true"],
        }
    }

    fn about(self) -> &'static str {
        match self {
            Manifest::Real => {
                "Partage for NVIDIA GPUs. Put the image where your nodes pull from, and its name below."
            }
            Manifest::Simulated => {
                "Partage with simulated GPUs, to try it without any. Never beside real ones."
            }
            Manifest::Withdraw => {
                "Takes back what Partage has put on nodes; before `kubectl delete`, see docs/install.md.\n\
                 # Who installed it with other folders of kubelet or CDI puts them in the place of /host/var/lib/kubelet and\n\
                 # /host/run/cdi below: what is elsewhere is not found, and stays."
            }
        }
    }

    /// What the file should have.
    pub fn render(self, settings: &Settings) -> Result<String, Missing> {
        let mut command = Command::new(binaries::helm(settings)?);
        command.args(["template", "partage"]).arg(deploy().join("chart/partage"));
        command.args(["--namespace", NAMESPACE, "--kube-version", KUBERNETES]);
        for value in self.values() {
            command.args(["--set", value]);
        }
        let doing = "rendering the chart";
        let output = command.output().map_err(Missing::io(doing))?;
        if !output.status.success() {
            let said = last_words(&String::from_utf8_lossy(&output.stderr));
            return Err(Missing::Failed { doing: doing.to_string(), said });
        }
        let rendered = String::from_utf8_lossy(&output.stdout);
        // Which file of the chart it was is nothing to who reads only this one.
        let lines: Vec<_> = rendered.lines().filter(|line| !line.starts_with("# Source: ")).collect();
        let rendered = lines.join("\n") + "\n";
        let objects = match self {
            // The rest is there, as it was installed.
            Manifest::Withdraw => {
                let agents = rendered.split("---\n").find(|object| object.contains("\nkind: DaemonSet\n"));
                format!("---\n{}", agents.unwrap_or_default())
            }
            Manifest::Real | Manifest::Simulated => format!("{SPACE}{rendered}"),
        };
        Ok(format!("# {}\n# Made from deploy/chart/partage by `make manifests`.\n{objects}", self.about()))
    }
}

/// The namespace of the plain manifests. With helm it is the release's.
pub const NAMESPACE: &str = "partage-system";

/// helm makes a namespace by itself, where told to.
const SPACE: &str = "---
apiVersion: v1
kind: Namespace
metadata:
  name: partage-system
  labels:
    app.kubernetes.io/name: partage
    # Agents mount folders of the node.
    pod-security.kubernetes.io/enforce: privileged
";

/// Writes every file.
pub fn write(settings: &Settings) -> Result<(), Missing> {
    for manifest in Manifest::ALL {
        let path = manifest.path();
        let text = manifest.render(settings)?;
        fs::write(&path, text).map_err(Missing::io(format!("writing {}", path.display())))?;
    }
    Ok(())
}

fn deploy() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).join("deploy")
}
