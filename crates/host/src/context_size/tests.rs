use super::*;

const UUID: &str = "GPU-0123abcd-4567-89ef-fedc-ba9876543210";

fn driver() -> InstalledDriver {
    InstalledDriver {
        cuda: "/cuda".into(),
        nvml: "/nvml".into(),
        simulated: Some("/node".into()),
        others: Default::default(),
    }
}

/// Runs a shell script in the place of the child, and returns the parsed output.
fn run_child(script: &str, longest: Duration) -> Result<Vec<(GpuUuid, Bytes)>, ContextSizeError> {
    measure_within(&driver(), Path::new("/bin/sh"), &["-c", script, "sh"], longest)
}

#[test]
fn child_receives_the_paths_of_the_driver() {
    let script = format!(
        "test \"$1 $2\" = '/cuda /nvml' && test -z \"$CUDA_VISIBLE_DEVICES\" && test \"$PARTAGE_SIM_DIR\" = /node && echo {UUID} 5"
    );
    assert_eq!(run_child(&script, MEASURE_TIMEOUT).unwrap(), [(GpuUuid::from(UUID), Bytes(5))]);
}

#[test]
fn failed_child_is_reported_with_its_last_line() {
    let error = run_child("echo one >&2; echo the last >&2; exit 3", MEASURE_TIMEOUT).unwrap_err();
    assert!(matches!(&error, ContextSizeError::Failed { words, .. } if words == "the last"), "{error}");
    let error = run_child("kill -9 $$", MEASURE_TIMEOUT).unwrap_err().to_string();
    assert!(error.contains("signal: 9") && error.contains("no error output"), "{error}");
}

#[test]
fn malformed_output_is_refused() {
    for answer in ["hello", UUID, "GPU-1 5", &format!("{UUID} -5"), &format!("{UUID} 5 6")] {
        let error = run_child(&format!("echo '{answer}'"), MEASURE_TIMEOUT).unwrap_err();
        assert!(matches!(&error, ContextSizeError::MalformedOutput(line) if line == answer), "{error}");
    }
    assert_eq!(run_child("true", MEASURE_TIMEOUT).unwrap(), []);
}

#[test]
fn hanging_child_is_killed() {
    // The file would show that the child was not killed.
    let folder = tempfile::tempdir().unwrap();
    let (pid, end) = (folder.path().join("pid"), folder.path().join("end"));
    let script = format!(
        "echo $$ >{}; exec 2>&- >&-; while sleep 0.1; do :; done; echo >{}",
        pid.display(),
        end.display()
    );
    // On a busy machine the shell may not start within a short timeout.
    let pid: i32 = [300, 2_000, 20_000]
        .into_iter()
        .find_map(|longest| {
            let error = run_child(&script, Duration::from_millis(longest)).unwrap_err();
            assert!(matches!(error, ContextSizeError::TimedOut), "{error}");
            std::fs::read_to_string(&pid).ok()?.trim().parse().ok()
        })
        .unwrap();
    let gone = rustix::process::test_kill_process(rustix::process::Pid::from_raw(pid).unwrap());
    assert_eq!(gone, Err(rustix::io::Errno::SRCH));
    assert!(!end.exists());
}

#[test]
fn missing_program_is_named() {
    let error = measure(&driver(), Path::new("/nowhere/partage"), &[]).unwrap_err();
    assert!(error.to_string().contains("/nowhere/partage"), "{error}");
}

#[test]
fn text_file_is_not_loaded_as_a_driver() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("libcuda.so.1");
    std::fs::write(&text, "not a library, but long enough to be looked at").unwrap();
    let error = CudaDriver::load(&text).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("libcuda.so.1") && error.contains("cannot load"), "{error}");
    let error = print_sizes(&text, &text, &mut Vec::new()).unwrap_err();
    assert!(matches!(&error, ContextSizeError::LoadFailed { path, .. } if *path == text), "{error}");
}
