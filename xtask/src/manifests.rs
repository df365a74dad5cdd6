//! Renders the plain manifests in `deploy/` from the chart, for users without helm.

use crate::binaries::{self, BuildPaths, MissingPrerequisite};
use crate::process::last_lines;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The Kubernetes version to render for. It decides only whether the chart accepts it.
const KUBE_VERSION: &str = "1.36.4";

/// One file of plain manifests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeployManifest {
    /// Agents for real GPUs.
    Real,
    /// Agents with simulated GPUs, for evaluation.
    Simulated,
    /// Agents that remove everything that agents have put on their nodes.
    Cleanup,
}

impl DeployManifest {
    /// Every file of plain manifests.
    pub const ALL: [DeployManifest; 3] =
        [DeployManifest::Real, DeployManifest::Simulated, DeployManifest::Cleanup];

    /// Returns the path of the file.
    pub fn path(self) -> PathBuf {
        deploy_dir().join(match self {
            DeployManifest::Real => "partage.yaml",
            DeployManifest::Simulated => "partage-simulated.yaml",
            DeployManifest::Cleanup => "partage-cleanup.yaml",
        })
    }

    fn chart_values(self) -> &'static [&'static str] {
        match self {
            DeployManifest::Real => &[],
            DeployManifest::Simulated => &["settings.driver=simulated"],
            DeployManifest::Cleanup => &["cleanup=true"],
        }
    }

    fn header_comment(self) -> &'static str {
        match self {
            DeployManifest::Real => {
                "Partage for NVIDIA GPUs. Push the image to a registry that your nodes can pull from, and set its name below."
            }
            DeployManifest::Simulated => {
                "Partage with simulated GPUs, for evaluation. Do not install it on nodes with real GPUs."
            }
            DeployManifest::Cleanup => {
                "Removes Partage's resources, labels and files from nodes. Apply it before `kubectl delete`, see docs/install.md.\n\
                 # If Partage was installed with other kubelet or CDI directories, replace /host/var/lib/kubelet and\n\
                 # /host/run/cdi below: files in other directories are not removed."
            }
        }
    }

    /// Renders the file's contents.
    pub fn render(self, settings: &BuildPaths) -> Result<String, MissingPrerequisite> {
        let mut command = Command::new(binaries::helm(settings)?);
        command.args(["template", "partage"]).arg(deploy_dir().join("chart/partage"));
        command.args(["--namespace", NAMESPACE, "--kube-version", KUBE_VERSION]);
        for value in self.chart_values() {
            command.args(["--set", value]);
        }
        let rendered = run_helm(&mut command, "rendering the chart")?;
        // The chart's file names are of no use in a single file.
        let lines: Vec<_> = rendered.lines().filter(|line| !line.starts_with("# Source: ")).collect();
        let rendered = lines.join("\n") + "\n";
        let objects = match self {
            // The other objects stay as they were installed.
            DeployManifest::Cleanup => {
                let agents = rendered.split("---\n").find(|object| object.contains("\nkind: DaemonSet\n"));
                format!("---\n{}", agents.unwrap_or_default())
            }
            DeployManifest::Real | DeployManifest::Simulated => format!("{NAMESPACE_MANIFEST}{rendered}"),
        };
        Ok(format!(
            "# {}\n# Generated from deploy/chart/partage by `make manifests`.\n{objects}",
            self.header_comment()
        ))
    }
}

/// Packages the chart into an archive in the directory `into`.
pub fn package_chart(settings: &BuildPaths, into: &Path) -> Result<(), MissingPrerequisite> {
    let mut command = Command::new(binaries::helm(settings)?);
    command.arg("package").arg(deploy_dir().join("chart/partage")).arg("--destination").arg(into);
    run_helm(&mut command, "packaging the chart").map(drop)
}

fn run_helm(command: &mut Command, doing: &str) -> Result<String, MissingPrerequisite> {
    let output = command.output().map_err(MissingPrerequisite::io(doing))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let message = last_lines(&String::from_utf8_lossy(&output.stderr));
    Err(MissingPrerequisite::Failed { doing: doing.to_string(), message })
}

/// The namespace of the plain manifests. With Helm it is the release's namespace.
pub const NAMESPACE: &str = "partage-system";

/// The namespace object, which helm creates itself on request.
const NAMESPACE_MANIFEST: &str = "---
apiVersion: v1
kind: Namespace
metadata:
  name: partage-system
  labels:
    app.kubernetes.io/name: partage
    # Agents mount directories of the node.
    pod-security.kubernetes.io/enforce: privileged
";

/// Writes every manifest to its file.
pub fn write(settings: &BuildPaths) -> Result<(), MissingPrerequisite> {
    for manifest in DeployManifest::ALL {
        let path = manifest.path();
        let text = manifest.render(settings)?;
        fs::write(&path, text).map_err(MissingPrerequisite::io(format!("writing {}", path.display())))?;
    }
    Ok(())
}

fn deploy_dir() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).join("deploy")
}
