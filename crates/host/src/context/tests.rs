use super::*;

const UUID: &str = "GPU-0123abcd-4567-89ef-fedc-ba9876543210";

fn driver() -> Driver {
    Driver {
        cuda: "/cuda".into(),
        nvml: "/nvml".into(),
        simulated: Some("/node".into()),
        others: Default::default(),
    }
}

/// What a shell script that stands for the child answers.
fn answered(script: &str, longest: Duration) -> Result<Vec<(GpuUuid, Bytes)>, ContextError> {
    within(&driver(), Path::new("/bin/sh"), &["-c", script, "sh"], longest)
}

#[test]
fn the_child_is_told_where_the_driver_is() {
    let script = format!(
        "test \"$1 $2\" = '/cuda /nvml' && test -z \"$CUDA_VISIBLE_DEVICES\" && test \"$PARTAGE_SIM_DIR\" = /node && echo {UUID} 5"
    );
    assert_eq!(answered(&script, LONGEST).unwrap(), [(GpuUuid::from(UUID), Bytes(5))]);
}

#[test]
fn a_child_that_fails_is_told_with_its_last_words() {
    let error = answered("echo one >&2; echo the last >&2; exit 3", LONGEST).unwrap_err();
    assert!(matches!(&error, ContextError::Failed { words, .. } if words == "the last"), "{error}");
    let error = answered("kill -9 $$", LONGEST).unwrap_err().to_string();
    assert!(error.contains("signal: 9") && error.contains("it said nothing"), "{error}");
}

#[test]
fn other_answers_are_not_taken() {
    for answer in ["hello", UUID, "GPU-1 5", &format!("{UUID} -5"), &format!("{UUID} 5 6")] {
        let error = answered(&format!("echo '{answer}'"), LONGEST).unwrap_err();
        assert!(matches!(&error, ContextError::Unreadable(line) if line == answer), "{error}");
    }
    assert_eq!(answered("true", LONGEST).unwrap(), []);
}

#[test]
fn a_child_that_hangs_is_killed() {
    // What it leaves behind would show that it went on.
    let folder = tempfile::tempdir().unwrap();
    let (pid, end) = (folder.path().join("pid"), folder.path().join("end"));
    let script = format!(
        "echo $$ >{}; exec 2>&- >&-; while sleep 0.1; do :; done; echo >{}",
        pid.display(),
        end.display()
    );
    // On a busy machine a shell may take longer to begin than it is given.
    let pid: i32 = [300, 2_000, 20_000]
        .into_iter()
        .find_map(|longest| {
            let error = answered(&script, Duration::from_millis(longest)).unwrap_err();
            assert!(matches!(error, ContextError::Hangs), "{error}");
            std::fs::read_to_string(&pid).ok()?.trim().parse().ok()
        })
        .unwrap();
    let gone = rustix::process::test_kill_process(rustix::process::Pid::from_raw(pid).unwrap());
    assert_eq!(gone, Err(rustix::io::Errno::SRCH));
    assert!(!end.exists());
}

#[test]
fn a_program_that_is_not_there_is_told() {
    let error = measure(&driver(), Path::new("/nowhere/partage"), &[]).unwrap_err();
    assert!(error.to_string().contains("/nowhere/partage"), "{error}");
}

#[test]
fn a_text_is_no_driver() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("libcuda.so.1");
    std::fs::write(&text, "not a library, but long enough to be looked at").unwrap();
    let error = Cuda::load(&text).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("libcuda.so.1") && error.contains("cannot be loaded"), "{error}");
    let error = answer(&text, &text, &mut Vec::new()).unwrap_err();
    assert!(matches!(&error, ContextError::NoLibrary { path, .. } if *path == text), "{error}");
}
