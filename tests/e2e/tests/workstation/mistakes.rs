//! What a tired person does, and what goes wrong around them.

use super::support::*;
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

#[test]
fn commands_that_cannot_be() {
    let home = Home::new();
    let plain = home.path().join("plain");
    fs::write(&plain, "#!/bin/sh\n").unwrap();
    let plain = plain.to_str().unwrap();
    for (arguments, code, words) in [
        (&["run"][..], 2, "<COMMAND>"),
        (&["run", "--memory", "1Gi", "--"], 2, "<COMMAND>"),
        (&["run", "--memory", "5gb", "--", "true"], 2, "5gb is no amount of memory: write 5Gi"),
        (&["run", "--memory", "90Gi", "--", "true"], 125, "GPU 0 has 39.39 GiB in all, 90 GiB asked"),
        (&["run", "--memory", "-1Gi", "--", "true"], 2, "-1"),
        (&["run", "--cores", "130", "--", "true"], 2, "130 is more than one GPU"),
        (&["run", "--memory", "1Gi", "--mode", "hard", "--", "true"], 125, "add --cores"),
        (&["run", "--gpus", "0", "--", "true"], 125, "ask for 1 to 16"),
        (&["run", "--gpus", "3", "--", "true"], 125, "the share wants 3 GPUs, 2 fit: "),
        (&["run", "--model", "H100", "--", "true"], 125, "GPU 0 is of another model than asked for; "),
        (&["run", "--whole", "--memory", "3Gi", "--", "true"], 125, "a whole GPU is all of it"),
        (&["run", "--name", "a/b", "--", "true"], 125, "cannot be a name"),
        (&["run", "--name", "..", "--", "true"], 125, "cannot be a name"),
        (&["run", "--name", "", "--", "true"], 125, "cannot be a name"),
        (&["run", "/tmp"], 126, "/tmp: "),
        (&["run", plain], 126, "it cannot be executed"),
        (&["run", "no-such-command"], 127, "no-such-command: no such command"),
        (&["run", "/no/such/command"], 127, "No such file"),
        (&["inspect"], 2, "<NAME>"),
        (&["inspect", "x"], 1, "no share is called x"),
        (&["pss"], 2, "ps"),
        (&["top", "--interval", "0"], 2, "0"),
    ] {
        let (was, said) = home.refused(arguments);
        assert!(
            was == code && said.starts_with("error: ") && said.contains(words),
            "{arguments:?}: {was} {said}"
        );
        // People have no pods and no containers here.
        assert!(!said.contains("pod") && !said.contains("container"), "{arguments:?}: {said}");
    }
    home.nothing_left();
    assert_eq!(home.shares().len(), 0);
}

/// The share was made by then, and is given back.
#[test]
fn a_command_that_fails_at_the_last_moment() {
    use std::os::unix::fs::PermissionsExt;
    let home = Home::new();
    let script = home.path().join("script");
    fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let (code, words) = home.refused(&["run", "-q", "--memory", "1Gi", "--", script.to_str().unwrap()]);
    assert!(code == 127 && words.starts_with(&format!("error: {}: ", script.display())), "{code} {words}");
    home.nothing_left();
    eventually("the share is given back", || home.shares().is_empty().then_some(()));
}

#[test]
fn names_and_memory_that_are_taken() {
    let home = Home::new();
    let _up = home.up("driver: simulated\nmetrics: off\nsimulated:\n  gpus: 1\n", &[]);
    let _one = home.share("one", &["--memory", "30Gi"], &["sleep", "1000"]);
    let (code, words) = home.refused(&["run", "--memory", "1Gi", "--name", "one", "--", "true"]);
    let user = home.find("one").unwrap()["user"].as_str().unwrap().to_string();
    let taken =
        format!("error: a share called one is there already, of user {user}: choose another with --name\n");
    assert_eq!((code, words), (125, taken));
    let (code, words) = home.refused(&["run", "--memory", "16Gi", "--", "true"]);
    assert!(code == 125 && words.contains("9.39 GiB") && words.contains("16 GiB asked"), "{words}");
    let (code, words) = home.refused(&["run", "--whole", "--", "true"]);
    assert!(code == 125 && words.starts_with("error: "), "{words}");
    // Room that is there is given.
    home.fine(&["run", "-q", "--memory", "9Gi", "--", "true"]);
}

#[test]
fn shares_do_not_nest() {
    let home = Home::new();
    let inner = format!("{} run --memory 1Gi -- true", partage_e2e::partage());
    let outer = ["run", "-q", "--memory", "1Gi", "--name", "outer", "--", "sh", "-c"];
    let (code, words) = home.refused(&[&outer[..], &[inner.as_str()]].concat());
    assert_eq!(code, 125);
    assert!(
        words.starts_with("error: this is already inside share outer, and shares do not nest"),
        "{words}"
    );
    let cleared = format!("env -i PARTAGE_HOME={} {inner}", home.path().display());
    let (code, words) = home.refused(&[&outer[..], &[cleared.as_str()]].concat());
    assert!(code == 125 && words.contains("shares do not nest"), "{words}");
    // From inside one can look on.
    let ps = format!("{} ps -o json", partage_e2e::partage());
    let seen = home.json(&[&outer[..], &[ps.as_str()]].concat());
    assert_eq!(seen["shares"][0]["name"], "outer");
    home.nothing_left();
}

#[test]
fn a_killed_keeper_is_followed_by_another() {
    let home = Home::new();
    let mut running = home.sleeper("lasting");
    let first = home.keeper().unwrap();
    let standby = eventually("somebody stands by", || home.standby());
    assert_ne!(first, standby);
    signal(first, libc::SIGKILL);
    // At once, as somebody types it who saw nothing of it.
    let share = home.find("lasting").unwrap();
    assert_eq!((&share["stage"], &share["pid"]), (&"running".into(), &running.pid().into()));
    // The one who stood by, or the one whom the command started: who has the lock first keeps.
    let second = eventually("another keeps", || home.keeper().filter(|pid| *pid != first));
    eventually("somebody stands by again", || home.standby().filter(|pid| *pid != second));

    // All at a time: there is nobody, until somebody asks.
    eventually("nobody keeps", || {
        for pid in [home.standby(), home.keeper()].into_iter().flatten() {
            signal(pid, libc::SIGKILL);
        }
        home.keeper().is_none().then_some(())
    });
    assert!(running.goes_on());
    assert_eq!(home.find("lasting").unwrap()["parts"][0]["memoryBytes"], 4 * GIB);
    home.fine(&["resize", "lasting", "--memory", "5Gi"]);
    home.fine(&["run", "-q", "--memory", "1Gi", "--", "true"]);
    home.fine(&["stop", "lasting"]);
    running.ended();
    home.nothing_left();

    // One whose command ends while nobody keeps is given back by the next keeper.
    let mut alone = home.sleeper("alone");
    let (keeper, standby) = (home.keeper().unwrap(), eventually("somebody stands by", || home.standby()));
    signal(standby, libc::SIGKILL);
    signal(keeper, libc::SIGKILL);
    alone.signal(libc::SIGKILL);
    alone.ended();
    assert_eq!(home.shares().len(), 0);
    home.nothing_left();
}

#[test]
fn two_ups_and_a_port_that_is_taken() {
    let home = Home::new();
    let mut up = home.up("driver: simulated\nmetrics: off\n", &[]);
    let (code, words) = home.refused(&["up", "--plain", "--metrics", "off"]);
    let expected = format!(
        "error: partage up already runs here, as process {}: watch it with partage top, or end that one first\n",
        up.pid()
    );
    assert_eq!((code, words), (1, expected));
    assert!(up.goes_on());
    up.signal(libc::SIGINT);
    assert!(up.ended().success());

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (code, words) = home.refused(&["up", "--plain", "--metrics", &address]);
    assert!(code == 1 && words.starts_with("error: ") && words.contains(&address), "{words}");
    let (code, words) = home.refused(&["up", "--metrics", "0.0.0.0:9464"]);
    assert!(code == 1 && words.contains("can be reached from other machines"), "{words}");
    assert_eq!(home.keeper(), None);
}

#[test]
fn settings_with_mistakes() {
    let home = Home::new();
    for (text, words) in [
        ("drivr: simulated\n", "drivr"),
        ("driver: amd\n", "amd"),
        ("driver: [\n", "settings.yaml"),
        ("metrics: 127.0.0.1\n", "127.0.0.1"),
        ("metrics: 0.0.0.0:9464\n", "other machines"),
        ("default:\n  memory: 5gb\n", "5gb"),
        ("default:\n  cores: 200\n", "200"),
        ("users:\n  - who: nobody-of-this-name\n    shares: 1\n", "there is no user nobody-of-this-name"),
        ("users:\n  - who: '*'\n    shares: 0\n", "shares: 0"),
        ("users:\n  - shares: 1\n", "who"),
        ("reservations:\n  - for: '*'\n    gpu: 0\n", "keeps nothing"),
    ] {
        let file = home.settings(text);
        let file = file.to_str().unwrap();
        for arguments in [&["up", "--check", "--settings", file][..], &["up", "--plain", "--settings", file]]
        {
            let (code, said) = home.refused(arguments);
            assert!(
                code == 1 && said.starts_with("error: ") && said.contains(words),
                "{text:?}: {code} {said}"
            );
            assert!(said.contains(file), "{said}");
        }
    }
    assert!(!home.path().join("keeper.sock").exists());
    // What only the machine can tell is told when it starts.
    let simulated = "driver: simulated\nmetrics: off\n";
    for (more, words) in [
        ("reservations:\n  - for: '*'\n    gpu: 7\n    memory: 1Gi\n", "names no GPU"),
        ("reservations:\n  - for: '*'\n    gpu: 1\n    memory: 90Gi\n", "more than its 39.39 GiB"),
        ("simulated:\n  model: RTX-9999\n", "RTX-9999"),
        ("simulated:\n  gpus: 0\n", "simulated"),
    ] {
        let file = home.settings(&format!("{simulated}{more}"));
        let (code, said) = home.refused(&["up", "--plain", "--settings", file.to_str().unwrap()]);
        assert!(code == 1 && said.starts_with("error: ") && said.contains(words), "{more:?}: {code} {said}");
    }
    let file = home.settings("driver: simulated\n");
    let file = file.to_str().unwrap();
    assert_eq!(
        home.fine(&["up", "--check", "--settings", file]),
        format!("the settings are right ({file})\n")
    );
}

#[test]
fn homes_that_cannot_be() {
    let home = Home::new();
    let long = home.path().join("x".repeat(120));
    let file = home.path().join("file");
    fs::write(&file, "").unwrap();
    let below = file.join("home");
    let mut wrong = vec![
        (long.to_str().unwrap(), "use a shorter one"),
        ("/tmp/a:b", "with :, ;"),
        (below.to_str().unwrap(), "cannot be made"),
        (file.to_str().unwrap(), "is no folder"),
    ];
    let others = home.path().join("others");
    fs::create_dir(&others).unwrap();
    if is_root() {
        std::os::unix::fs::chown(&others, Some(61001), Some(61001)).unwrap();
        wrong.push((others.to_str().unwrap(), "is somebody else's"));
    }
    for (folder, words) in wrong {
        let (code, said) = home.refused(&["run", "--home", folder, "--", "true"]);
        assert!(
            code == 125 && said.starts_with("error: ") && said.contains(words),
            "{folder}: {code} {said}"
        );
        let (code, said) = home.refused(&["ps", "--home", folder]);
        assert!(code == 2 && said.contains(words), "{folder}: {code} {said}");
    }
}

#[test]
fn homes_do_not_disturb_each_other() {
    let homes = [Home::new(), Home::new()];
    let shares = homes.each_ref().map(|home| home.sleeper("same"));
    for (home, mut running) in homes.iter().zip(shares) {
        let share = home.find("same").unwrap();
        assert_eq!((&share["pid"], &share["members"]), (&running.pid().into(), &1.into()));
        assert_eq!(share["cgroup"] == true, home.cgroups().len() == 1, "{share}");
        home.fine(&["stop", "same"]);
        running.ended();
        home.nothing_left();
    }
}

/// A file system of a few pages, gone with the test.
struct Tiny<'a>(&'a Path);

impl<'a> Tiny<'a> {
    fn mount(at: &'a Path, size: &str) -> Tiny<'a> {
        let options = format!("size={size},mode=755");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "partage-test"]).arg(at);
        assert!(mount.status().unwrap().success());
        Tiny(at)
    }
}

impl Drop for Tiny<'_> {
    fn drop(&mut self) {
        // Whoever still looks at it loses it with their last file.
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

#[test]
fn a_full_disk() {
    if !is_root() {
        return skip_or_fail(&"mounting a small file system needs root");
    }
    let folder = Home::new();
    // Too small for anything.
    let small = folder.path().join("s");
    fs::create_dir(&small).unwrap();
    {
        let _tiny = Tiny::mount(&small, "64k");
        let home = Home::at(small.join("h"));
        let (code, words) = home.refused(&["run", "--memory", "1Gi", "--", "true"]);
        assert!(code == 125 && words.starts_with("error: ") && words.contains("No space left"), "{words}");
        assert_eq!(home.left(), Vec::<String>::new());
    }
    // It runs full later.
    let large = folder.path().join("l");
    fs::create_dir(&large).unwrap();
    let _tiny = Tiny::mount(&large, "64m");
    let home = Home::at(large.join("h"));
    let mut running = home.sleeper("before");
    let filler = large.join("filler");
    let _ = fs::write(&filler, vec![0u8; 64 << 20]);
    let (code, words) = home.refused(&["run", "--memory", "1Gi", "--name", "after", "--", "true"]);
    assert!(code == 125 && words.starts_with("error: ") && words.contains("No space left"), "{words}");
    let names: Vec<_> = home.shares().iter().map(|share| share["name"].clone()).collect();
    assert_eq!(names, ["before"]);
    // What cannot be written down is not done either.
    let (code, words) = home.refused(&["resize", "before", "--memory", "6Gi"]);
    assert!(code == 2 && words.contains("No space left"), "{code} {words}");
    assert_eq!(home.find("before").unwrap()["parts"][0]["memoryBytes"], 4 * GIB);
    assert!(running.goes_on());
    // A keeper that is killed now is followed by one all the same.
    signal(home.keeper().unwrap(), libc::SIGKILL);
    assert_eq!(home.find("before").unwrap()["stage"], "running");
    fs::remove_file(&filler).unwrap();
    home.fine(&["run", "-q", "--memory", "1Gi", "--name", "after", "--", "true"]);
    home.fine(&["resize", "before", "--memory", "6Gi"]);
    home.fine(&["stop", "before"]);
    running.ended();
    home.nothing_left();
}
