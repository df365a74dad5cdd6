//! Removes Partage from a node.

use crate::api_server::ApiServer;
use crate::app::instance_lock;
use crate::config::{AgentError, Config};
use crate::{plugin, publish};
use partage_host::cdi;
use std::fs;
use std::path::Path;
use tokio_util::sync::CancellationToken;

/// Withdraws what the node has published, and removes every file that an agent keeps on it.
pub async fn withdraw(config: Config) -> Result<(), AgentError> {
    let config = config.resolved();
    let cluster = ApiServer::connect(config.kubeconfig.as_deref(), &config.node).await?;
    // An agent that still runs would write everything again. Where its directory is gone, none runs.
    let never = CancellationToken::new();
    let _lock = if config.run.exists() { instance_lock(&never, &config.run).await } else { None };
    publish::withdraw(&cluster).await?;
    let cdi = cdi::Folder::new(&config.cdi);
    remove_specs(&cdi).map_err(AgentError::io(&config.cdi))?;
    for directory in [&config.run, &config.state] {
        empty(directory)?;
    }
    // An agent that was killed could not remove its own.
    let sockets = config.device_plugins();
    plugin::remove_sockets(&sockets).map_err(AgentError::io(&sockets))?;
    tracing::info!("nothing of Partage is left on node {}", config.node);
    Ok(())
}

fn remove_specs(cdi: &cdi::Folder) -> std::io::Result<()> {
    cdi.remove_unfinished()?;
    for found in cdi.all()? {
        cdi.remove(&found.name)?;
    }
    cdi.remove_shared()
}

/// Removes everything in a directory, and the directory itself unless something is mounted there.
fn empty(directory: &Path) -> Result<(), AgentError> {
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
