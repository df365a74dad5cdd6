//! What one CUDA context takes on each card, measured.
//!
//! Only a process with a context can tell. A child does it: who asks keeps CUDA out of its own process, where it could never
//! be unloaded again and would hold a context of its own.

mod cuda;

use crate::driver::{Driver, SIMULATED};
use crate::gpus::{uuid_bytes, uuid_of};
use cuda::Cuda;
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use partage_core::model::{Bytes, GpuUuid};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A driver that takes longer to make its contexts than this hangs.
const LONGEST: Duration = Duration::from_secs(60);
/// How often is looked whether the child has ended.
const GLANCE: Duration = Duration::from_millis(5);

/// Why it is not known what a context takes.
#[derive(Debug, thiserror::Error)]
pub enum ContextError {
    /// The child did not start.
    #[error("what a CUDA context takes cannot be measured: {} does not start: {error}", program.display())]
    NoChild {
        /// The program.
        program: PathBuf,
        /// What the system said.
        #[source]
        error: io::Error,
    },
    /// The child did not end.
    #[error(
        "what a CUDA context takes cannot be measured: the driver made no contexts within {} s; see dmesg for what hinders it",
        LONGEST.as_secs()
    )]
    Hangs,
    /// The child failed.
    #[error("what a CUDA context takes cannot be measured: the measurement ended with {status}: {words}")]
    Failed {
        /// How it ended.
        status: ExitStatus,
        /// What it said.
        words: String,
    },
    /// The child said something else.
    #[error(
        "what a CUDA context takes cannot be measured: the measurement answered \"{0}\" instead of a GPU and bytes"
    )]
    Unreadable(String),
    /// The library cannot be loaded.
    #[error("{}: the driver cannot be loaded: {what}", path.display())]
    NoLibrary {
        /// The file.
        path: PathBuf,
        /// What the loader or the library said.
        what: String,
    },
    /// The driver refused.
    #[error("the driver refused {call} with {code}")]
    Refused {
        /// The function.
        call: &'static str,
        /// CUDA's answer.
        code: u32,
    },
    /// Nobody reads the answer.
    #[error("the answer cannot be written: {0}")]
    NobodyReads(#[from] io::Error),
}

/// Runs `program arguments… CUDA NVML`, which must call [`answer`], and reads what it says: bytes for every GPU that a
/// context could be made on and that the driver tells a process's memory of.
pub fn measure(
    driver: &Driver,
    program: &Path,
    arguments: &[&str],
) -> Result<Vec<(GpuUuid, Bytes)>, ContextError> {
    within(driver, program, arguments, LONGEST)
}

fn within(
    driver: &Driver,
    program: &Path,
    arguments: &[&str],
    longest: Duration,
) -> Result<Vec<(GpuUuid, Bytes)>, ContextError> {
    let mut command = Command::new(program);
    command.args(arguments).arg(&driver.cuda).arg(&driver.nvml);
    // All GPUs, whatever the caller may see.
    command.env_remove("CUDA_VISIBLE_DEVICES");
    if let Some(node) = &driver.simulated {
        command.env(SIMULATED, node);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let failed = |error| ContextError::NoChild { program: program.into(), error };
    let mut child = command.spawn().map_err(failed)?;
    let (out, err) = (reader(child.stdout.take()), reader(child.stderr.take()));
    let Some(status) = wait(&mut child, longest).map_err(failed)? else { return Err(ContextError::Hangs) };
    // Threads that only read do not panic.
    let (out, err) = (out.join().unwrap_or_default(), err.join().unwrap_or_default());
    if !status.success() {
        let words = err.trim().lines().last().unwrap_or("it said nothing").to_string();
        return Err(ContextError::Failed { status, words });
    }
    let sizes: Vec<(GpuUuid, Bytes)> = out
        .lines()
        .map(|line| read(line).ok_or_else(|| ContextError::Unreadable(line.into())))
        .collect::<Result<_, _>>()?;
    for (gpu, bytes) in &sizes {
        tracing::debug!(%gpu, context_bytes = bytes.0, "context measured");
    }
    Ok(sizes)
}

/// Reads all of a pipe, so that the child does not wait for room in it.
fn reader(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // What was read until then is all there is.
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// How a child ended; `None` if it had to be killed.
fn wait(child: &mut Child, longest: Duration) -> io::Result<Option<ExitStatus>> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if begun.elapsed() > longest {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(GLANCE);
    }
}

/// Reads `GPU-… bytes`.
fn read(line: &str) -> Option<(GpuUuid, Bytes)> {
    let (uuid, bytes) = line.split_once(' ')?;
    let uuid = GpuUuid::from(uuid);
    uuid_bytes(&uuid)?;
    Some((uuid, Bytes(bytes.parse().ok()?)))
}

/// What the child does: makes a context on every GPU, one after the other, and writes a line with what this process then holds
/// there.
pub fn answer(cuda: &Path, nvml: &Path, out: &mut dyn Write) -> Result<(), ContextError> {
    let library = |what: String| ContextError::NoLibrary { path: nvml.into(), what };
    let session = Nvml::builder().lib_path(nvml.as_os_str()).init();
    let session = session.map_err(|error| library(error.to_string()))?;
    let cuda = Cuda::load(cuda)?;
    for device in cuda.devices()? {
        // A GPU that does not work, or is somebody's alone, is none to measure.
        let Ok(context) = cuda.context(device) else { continue };
        let uuid = uuid_of(context.uuid());
        if let Some(bytes) = held(&session, &uuid) {
            writeln!(out, "{uuid} {bytes}")?;
        }
    }
    Ok(out.flush()?)
}

/// What this process holds on a GPU; `None` where the driver does not tell.
fn held(nvml: &Nvml, uuid: &GpuUuid) -> Option<u64> {
    let processes = nvml.device_by_uuid(uuid.as_str()).ok()?.running_compute_processes().ok()?;
    let own = processes.into_iter().find(|process| process.pid == std::process::id())?;
    match own.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(bytes),
        UsedGpuMemory::Unavailable => None,
    }
}

#[cfg(test)]
mod tests;
