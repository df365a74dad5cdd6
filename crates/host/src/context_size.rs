//! Measures how much memory a CUDA context takes on each GPU.
//!
//! Only a process that has a context can measure it. A child process does, because CUDA cannot be unloaded and would
//! hold a context in the calling process.

mod cuda;

use crate::driver::{InstalledDriver, SIM_DIR_VARIABLE};
use crate::gpus::{uuid_bytes, uuid_from_bytes};
use cuda::CudaDriver;
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use partage_core::model::{Bytes, GpuUuid};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How long the driver may take to create its contexts.
const MEASURE_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between checks whether the child has exited.
const CHILD_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Why the size of a context cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum ContextSizeError {
    /// The child cannot be started.
    #[error("cannot measure the size of a CUDA context: cannot start {}: {error}", program.display())]
    NotStarted {
        /// The program of the child.
        program: PathBuf,
        /// The error of the system.
        #[source]
        error: io::Error,
    },
    /// The child did not exit in time.
    #[error(
        "cannot measure the size of a CUDA context: the driver created no contexts within {} s; see dmesg for the cause",
        MEASURE_TIMEOUT.as_secs()
    )]
    TimedOut,
    /// The child exited with an error.
    #[error("cannot measure the size of a CUDA context: the measurement ended with {status}: {words}")]
    Failed {
        /// The exit status of the child.
        status: ExitStatus,
        /// The last line that the child wrote to standard error.
        words: String,
    },
    /// The output of the child is malformed.
    #[error(
        "cannot measure the size of a CUDA context: the measurement printed \"{0}\" instead of a GPU and bytes"
    )]
    MalformedOutput(String),
    /// A library of the driver cannot be loaded.
    #[error("{}: cannot load the driver: {what}", path.display())]
    LoadFailed {
        /// The path of the library.
        path: PathBuf,
        /// The error of the loader or of the library.
        what: String,
    },
    /// A driver call failed.
    #[error("driver call {call} failed with {code}")]
    CallFailed {
        /// The name of the function.
        call: &'static str,
        /// The result code of CUDA.
        code: u32,
    },
    /// The result cannot be written to standard output.
    #[error("cannot write the result: {0}")]
    Output(#[from] io::Error),
}

/// Runs `program arguments… CUDA NVML`, which must call [`print_sizes`], and parses its output: the size in bytes for
/// each GPU on which a context could be created and whose driver reports the memory of a process.
pub fn measure(
    driver: &InstalledDriver,
    program: &Path,
    arguments: &[&str],
) -> Result<Vec<(GpuUuid, Bytes)>, ContextSizeError> {
    measure_within(driver, program, arguments, MEASURE_TIMEOUT)
}

fn measure_within(
    driver: &InstalledDriver,
    program: &Path,
    arguments: &[&str],
    longest: Duration,
) -> Result<Vec<(GpuUuid, Bytes)>, ContextSizeError> {
    let mut command = Command::new(program);
    command.args(arguments).arg(&driver.cuda).arg(&driver.nvml);
    // All GPUs are measured, not only those visible to the caller.
    command.env_remove("CUDA_VISIBLE_DEVICES");
    if let Some(node) = &driver.simulated {
        command.env(SIM_DIR_VARIABLE, node);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let failed = |error| ContextSizeError::NotStarted { program: program.into(), error };
    let mut child = command.spawn().map_err(failed)?;
    let (out, err) = (read_in_background(child.stdout.take()), read_in_background(child.stderr.take()));
    let Some(status) = wait_with_timeout(&mut child, longest).map_err(failed)? else {
        return Err(ContextSizeError::TimedOut);
    };
    // A thread that only reads does not panic.
    let (out, err) = (out.join().unwrap_or_default(), err.join().unwrap_or_default());
    if !status.success() {
        let words = err.trim().lines().last().unwrap_or("no error output").to_string();
        return Err(ContextSizeError::Failed { status, words });
    }
    let sizes: Vec<(GpuUuid, Bytes)> = out
        .lines()
        .map(|line| parse_line(line).ok_or_else(|| ContextSizeError::MalformedOutput(line.into())))
        .collect::<Result<_, _>>()?;
    for (gpu, bytes) in &sizes {
        tracing::debug!(%gpu, context_bytes = bytes.0, "context size measured");
    }
    Ok(sizes)
}

/// Reads a pipe to its end in a thread, so that the child does not block on a full pipe.
fn read_in_background(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // After an error, what was read before it is returned.
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Returns the exit status of a child; `None` if it was killed after the timeout.
fn wait_with_timeout(child: &mut Child, longest: Duration) -> io::Result<Option<ExitStatus>> {
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
        thread::sleep(CHILD_POLL_INTERVAL);
    }
}

/// Parses a line of the form `GPU-… bytes`.
fn parse_line(line: &str) -> Option<(GpuUuid, Bytes)> {
    let (uuid, bytes) = line.split_once(' ')?;
    let uuid = GpuUuid::from(uuid);
    uuid_bytes(&uuid)?;
    Some((uuid, Bytes(bytes.parse().ok()?)))
}

/// Creates a context on each GPU, one after the other, and writes a line with the memory that this process then holds
/// there. The child process calls it.
pub fn print_sizes(cuda: &Path, nvml: &Path, out: &mut dyn Write) -> Result<(), ContextSizeError> {
    let library = |what: String| ContextSizeError::LoadFailed { path: nvml.into(), what };
    let session = Nvml::builder().lib_path(nvml.as_os_str()).init();
    let session = session.map_err(|error| library(error.to_string()))?;
    let cuda = CudaDriver::load(cuda)?;
    for device in cuda.devices()? {
        // A GPU that is broken or in exclusive use cannot be measured.
        let Ok(context) = cuda.context(device) else { continue };
        let uuid = uuid_from_bytes(context.uuid());
        if let Some(bytes) = memory_of_this_process(&session, &uuid) {
            writeln!(out, "{uuid} {bytes}")?;
        }
    }
    Ok(out.flush()?)
}

/// Returns the memory in bytes that this process holds on a GPU; `None` if the driver does not report it.
fn memory_of_this_process(nvml: &Nvml, uuid: &GpuUuid) -> Option<u64> {
    let processes = nvml.device_by_uuid(uuid.as_str()).ok()?.running_compute_processes().ok()?;
    let own = processes.into_iter().find(|process| process.pid == std::process::id())?;
    match own.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(bytes),
        UsedGpuMemory::Unavailable => None,
    }
}

#[cfg(test)]
mod tests;
