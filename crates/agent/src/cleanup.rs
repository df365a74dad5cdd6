//! Removes Partage from a node.

use crate::api_server::ApiServer;
use crate::app::instance_lock;
use crate::config::{AgentConfig, AgentError};
use crate::{device_plugin, node_status};
use partage_host::cdi;
use std::fs;
use std::path::Path;
use tokio_util::sync::CancellationToken;

/// Removes what the agent has published on the node object, and every file that agents keep on the node.
pub async fn clean_up(config: AgentConfig) -> Result<(), AgentError> {
    let config = config.resolved();
    let cluster = ApiServer::connect(config.kubeconfig.as_deref(), &config.node).await?;
    // An agent that still runs would write everything again. If its runtime directory is gone, none runs.
    let never = CancellationToken::new();
    let _lock = if config.run.exists() { instance_lock(&never, &config.run).await } else { None };
    node_status::clean_up(&cluster).await?;
    let cdi = cdi::SpecDir::new(&config.cdi);
    remove_specs(&cdi).map_err(AgentError::io(&config.cdi))?;
    for directory in [&config.run, &config.state] {
        remove_contents(directory)?;
    }
    // An agent that was killed has left its sockets.
    let sockets = config.device_plugins();
    device_plugin::remove_sockets(&sockets).map_err(AgentError::io(&sockets))?;
    tracing::info!(node = %config.node, "Partage removed from the node");
    Ok(())
}

fn remove_specs(cdi: &cdi::SpecDir) -> std::io::Result<()> {
    cdi.remove_temp_files()?;
    for found in cdi.all()? {
        cdi.remove(&found.name)?;
    }
    cdi.remove_shared()
}

/// Removes everything in a directory, and the directory itself unless something is mounted there.
fn remove_contents(directory: &Path) -> Result<(), AgentError> {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let removed = if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        };
        removed.map_err(AgentError::io(&path))?;
    }
    let _ = fs::remove_dir(directory);
    Ok(())
}
