//! Several users on one machine: whose shares are whose, and who may take how much.

use crate::fixture::{ADA, BOB, EVE, Place, as_user, without_namespaces};
use crate::support::{GIB, Home, Running, eventually, is_root, skip_or_fail};
use serde_json::Value;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;

/// Nobody can be somebody else without being root.
fn cannot() -> bool {
    if !is_root() {
        skip_or_fail(&"it takes root to be several users");
    }
    !is_root()
}

#[test]
fn shares_belong_to_who_made_them() {
    if cannot() {
        return;
    }
    let (place, mut up) = Place::kept("");
    let four = ["--memory", "4Gi", "--cores", "20"];
    let (mut ada, said) = place.sleeper(ADA, "users-ada", &four);
    assert!(said.ends_with("; held by a user namespace"), "{said}");
    up.says(&format!("share granted share=users-ada grant=4 GiB and 20 % of GPU 0 user={ADA}"));
    let (mut bob, _) = place.sleeper(BOB, "users-bob", &four);
    let (mut second, _) = place.sleeper(BOB, "users-bob-2", &four);
    let (mut eve, _) = place.sleeper(EVE, "users-eve", &four);
    // Everybody sees everything: who waits wants to know for whom.
    let report: Value = serde_json::from_str(&place.fine(EVE, &["ps", "-o", "json"])).unwrap();
    let owners: Vec<(&str, u64)> = report["shares"].as_array().unwrap().iter().map(owner).collect();
    let bobs = u64::from(BOB);
    let expected =
        [("users-ada", ADA.into()), ("users-bob", bobs), ("users-bob-2", bobs), ("users-eve", EVE.into())];
    assert!(expected.iter().all(|one| owners.contains(one)) && owners.len() == 4, "{owners:?}");

    let not_yours = |name: &str, owner: u32| {
        format!("error: {name} belongs to user {owner}: only they and the administrator may change it\n")
    };
    for arguments in [&["stop", "users-ada"][..], &["resize", "users-ada", "--memory", "1Gi"]] {
        assert_eq!(place.refused(BOB, arguments), (1, not_yours("users-ada", ADA)), "{arguments:?}");
    }
    assert_eq!(place.home.find("users-ada").unwrap()["parts"][0]["memoryBytes"], 4 * GIB);
    let (code, taken) = place.refused(EVE, &["run", "--name", "users-ada", "--memory", "1Gi", "--", "true"]);
    assert!(code == 125 && taken.contains(&format!("is there already, of user {ADA}")), "{taken}");
    let (code, words) = place.refused(EVE, &["up", "--metrics", "off"]);
    assert!(code == 1 && words.contains("only the keeper's own user may take over from it"), "{words}");

    place.fine(ADA, &["resize", "users-ada", "--memory", "6Gi"]);
    assert_eq!(place.home.find("users-ada").unwrap()["parts"][0]["memoryBytes"], 6 * GIB);
    let stopped: Value = serde_json::from_str(&place.fine(BOB, &["stop", "--all", "-o", "json"])).unwrap();
    assert_eq!(stopped["stopped"].as_array().unwrap().len(), 2, "{stopped}");
    assert!(!bob.ended().success() && !second.ended().success() && ada.goes_on() && eve.goes_on());
    assert_eq!(place.fine(BOB, &["stop", "--all"]), "none of the shares is yours: nothing to stop\n");
    // The administrator may.
    place.home.fine(&["stop", "users-eve"]);
    assert!(!eve.ended().success());
    place.fine(ADA, &["stop", "users-ada"]);
    assert!(!ada.ended().success());
    place.home.nothing_left();
}

fn owner(share: &Value) -> (&str, u64) {
    (share["name"].as_str().unwrap(), share["uid"].as_u64().unwrap())
}

#[test]
fn rules_say_who_may_have_how_much() {
    if cannot() {
        return;
    }
    let settings = format!(
        "default: {{memory: 3Gi, cores: 10}}\n\
         users:\n\
         - {{who: {ADA}, shares: 2, memory: 8Gi, cores: 50, whole: false}}\n\
         - {{who: \"@{BOB}\", gpus: 1, only: [1]}}\n\
         reservations:\n\
         - {{for: {ADA}, gpu: 1, memory: 30Gi}}\n"
    );
    let (place, _up) = Place::kept(&settings);
    let run = |uid: u32, options: &[&str]| {
        let (code, words) = place.refused(uid, &[&["run"], options, &["--", "true"]].concat());
        assert_eq!(code, 125, "{words}");
        words
    };
    let expect = |words: String, what: &str| assert!(words.contains(what), "{what:?} is not in {words:?}");
    expect(run(EVE, &["--memory", "1Gi"]), "name nobody like you under users");
    expect(run(ADA, &["--whole"]), "may not have a GPU alone: ask for a part");
    expect(run(ADA, &["--memory", "9Gi"]), "may have 8 GiB of GPU memory in all, has 0 B and asks for 9 GiB");
    expect(run(ADA, &["--memory", "2Gi", "--cores", "60"]), "may have 50 % of GPU time in all");
    // What nobody said the size of is what the settings say.
    let (_first, said) = place.sleeper(ADA, "rules-one", &[]);
    assert!(said.contains(": 3 GiB and 10 % of GPU "), "{said}");
    let words = run(ADA, &["--memory", "6Gi"]);
    assert!(
        words.contains("has 3 GiB and asks for 6 GiB") && words.contains("stop another share"),
        "{words}"
    );
    let (code, words) = place.refused(ADA, &["resize", "rules-one", "--memory", "9Gi"]);
    assert!(code == 1 && words.contains("may have 8 GiB of GPU memory in all"), "{words}");
    let (_second, _) = place.sleeper(ADA, "rules-two", &["--memory", "1Gi"]);
    expect(run(ADA, &["--memory", "1Gi"]), "may have 2 shares at a time and has rules-one, rules-two");

    expect(run(BOB, &["--gpus", "2", "--memory", "1Gi"]), "may have 1 GPUs in one share, asked are 2");
    // Ada's shares were spread, one to each GPU: what she holds on GPU 1 is of what is kept for her there.
    let words = run(BOB, &["--memory", "12Gi"]);
    assert!(words.contains("of GPU 1 is kept for 61001"), "{words}");
    let (_bob, said) = place.sleeper(BOB, "rules-bob", &["--memory", "9Gi"]);
    assert!(said.contains("9 GiB of GPU 1"), "{said}");
    // The administrator is above the rules, and not above what is kept for others.
    let (code, words) = place.home.refused(&["run", "--whole", "--gpus", "2", "--", "true"]);
    assert_eq!(code, 125, "{words}");
    place.home.fine(&["run", "--memory", "20Gi", "--", "true"]);
}

#[test]
fn a_user_keeps_a_home_of_their_own() {
    if cannot() {
        return;
    }
    let place = Place::of(ADA);
    let memory = ["run", "--name", "own-greedy", "--memory", "2Gi", "--"];
    let sample = place.sample();
    let mut greedy =
        Running::start(place.partage(ADA, &[&memory[..], &["env", "-i", &sample, "greedy"]].concat()));
    let said = greedy.says("partage: own-greedy: ");
    assert!(said.contains("2 GiB of GPU 0; held by a user namespace"), "{said}");
    // 512 MiB at a time; the context takes some.
    let refused = greedy.says("refused at ");
    assert!(refused.contains("refused at 1.5 GiB") || refused.contains("refused at 1.0 GiB"), "{refused}");
    let report: Value = serde_json::from_str(&place.fine(ADA, &["ps", "-o", "json"])).unwrap();
    let share = &report["shares"][0];
    assert_eq!((&share["uid"], &share["binding"]), (&ADA.into(), &"user namespace".into()), "{share}");
    assert!(share["parts"][0]["peakBytes"].as_u64().unwrap() <= 2 * GIB, "{share}");
    assert!(share["parts"][0]["refusals"].as_u64().unwrap() >= 1, "{share}");
    // Nobody else has business there.
    let (code, words) = place.refused(BOB, &["ps"]);
    assert!(code == 2 && words.contains("ermission denied"), "{code} {words}");
    greedy.signal(libc::SIGTERM);
    assert!(greedy.ended().success());
    place.home.nothing_left();
    assert_eq!(place.fine(ADA, &["ps"]), "no shares: partage run --memory 4Gi -- COMMAND starts one\n");
}

#[test]
fn without_namespaces_the_library_path_holds_limits() {
    if cannot() {
        return;
    }
    let place = Place::of(ADA);
    let sample = place.sample();
    // One after the other: greedy leaves nothing to who comes later.
    let script = format!("{sample} trainer --memory 256Mi & read go; {sample} greedy & wait");
    let arguments = ["run", "--name", "path", "--memory", "2Gi", "--", "sh", "-c", &script];
    let mut command = place.partage(ADA, &arguments);
    without_namespaces(&mut command, ADA);
    let mut both = Running::start(command);
    let said = both.says("partage: path: ");
    assert!(said.ends_with("2 GiB of GPU 0; held by a library path"), "{said}");
    let why = both.says("partage: ");
    assert!(why.contains("a program that clears its environment leaves the share"), "{why}");
    assert!(why.contains("user.max_user_namespaces is 0"), "{why}");
    both.says("the model takes");
    both.input.as_mut().unwrap().write_all(b"go\n").unwrap();
    // 512 MiB at a time, beside a neighbour in the same share and two contexts.
    both.says("refused at 0.5 GiB");
    let report: Value = serde_json::from_str(&place.fine(ADA, &["ps", "-o", "json"])).unwrap();
    let share = &report["shares"][0];
    assert_eq!(share["binding"], "library path", "{share}");
    assert!(share["parts"][0]["peakBytes"].as_u64().unwrap() <= 2 * GIB, "{share}");
    let mut again = place.partage(ADA, &["run", "--memory", "1Gi", "--", "true"]);
    without_namespaces(&mut again, ADA);
    assert!(again.status().unwrap().success());
    // The shell ends, and what it started goes on: the share is theirs.
    both.signal(libc::SIGKILL);
    assert!(!both.ended().success());
    eventually("the share lingers", || {
        let report: Value = serde_json::from_str(&place.fine(ADA, &["ps", "-o", "json"])).unwrap();
        (report["shares"][0]["stage"] == "lingering").then_some(())
    });
    let stopped: Value = serde_json::from_str(&place.fine(ADA, &["stop", "path", "-o", "json"])).unwrap();
    assert_eq!(stopped["stopped"][0]["ended"], 2, "{stopped}");
    place.home.nothing_left();
}

#[test]
fn users_are_not_turned_away_while_one_keeper_follows_another() {
    if cannot() {
        return;
    }
    let (place, up) = Place::kept("");
    let (_ada, _) = place.sleeper(ADA, "turn-ada", &["--memory", "1Gi"]);
    eventually("somebody stands by", || place.home.standby());
    up.signal(libc::SIGKILL);
    place.fine(BOB, &["ps"]);
    for _ in 0..4 {
        let keeper = eventually("somebody keeps", || place.home.keeper());
        eventually("somebody stands by", || place.home.standby());
        crate::support::signal(keeper, libc::SIGKILL);
        let run = ["run", "-q", "--memory", "1Gi", "--", "true"];
        place.fine(BOB, &run);
    }
    assert!(place.home.find("turn-ada").is_some());
    // Without shares nobody follows, and a user cannot.
    place.home.fine(&["stop", "turn-ada"]);
    let keeper = eventually("somebody keeps", || place.home.keeper());
    crate::support::signal(keeper, libc::SIGKILL);
    let words = eventually("nobody keeps", || {
        let output = place.output(BOB, &["ps"]);
        (!output.status.success()).then(|| String::from_utf8(output.stderr).unwrap())
    });
    assert!(words.contains("is somebody else's, and nobody answers there"), "{words}");
}

#[test]
fn nobody_reaches_into_the_share_of_another() {
    if cannot() {
        return;
    }
    let (place, mut up) = Place::kept("");
    let sample = place.sample();
    let greedy = |uid: u32, name: &str| {
        let arguments = ["run", "--name", name, "--memory", "2Gi", "--cores", "20", "--", &sample, "greedy"];
        let mut running = Running::start(place.partage(uid, &arguments));
        running.says("refused at 1.5 GiB");
        running
    };
    let mut shares = [greedy(ADA, "reach-ada"), greedy(0, "reach-root")];
    for name in ["reach-ada", "reach-root"] {
        let region = place.home.path().join("shares").join(name).join("region");
        for file in ["usage", "limits"] {
            let opened = as_user(BOB, || OpenOptions::new().write(true).open(region.join(file)));
            assert_eq!(opened.unwrap_err().kind(), ErrorKind::PermissionDenied, "{name}: {file}");
        }
        for folder in [region.clone(), region.join("..")] {
            let removed = as_user(BOB, || std::fs::remove_dir_all(&folder));
            assert!(removed.is_err() && region.join("usage").exists(), "{name}");
        }
    }
    // One's own can be cut short. That ends one's own programs, and nothing else.
    let own = place.home.path().join("shares/reach-ada/region/usage");
    as_user(ADA, || OpenOptions::new().write(true).truncate(true).open(&own)).unwrap();
    assert!(!shares[0].ended().success());
    eventually("it is given back", || place.home.find("reach-ada").is_none().then_some(()));
    shares[1].says("refused at 1.5 GiB");
    assert!(up.goes_on());
    place.home.fine(&["stop", "reach-root"]);
    place.home.nothing_left();
}

#[test]
fn a_command_of_any_length_is_in_nobodys_way() {
    let home = Home::new();
    let word = "x".repeat(100_000);
    let words = [&["sh", "-c", "echo $#; exec sleep 1000"][..], &[word.as_str(); 14]].concat();
    let mut long = home.share("long", &["--memory", "1Gi"], &words);
    // The command itself has all of it.
    long.until(|line| line == "13");
    let table = home.fine(&["ps"]);
    assert!(table.contains("x…") && table.len() < 4000, "{table}");
    home.fine(&["inspect", "long"]);
    home.fine(&["top", "--once", "--interval", "50ms"]);
    home.fine(&["stop", "long"]);
    home.nothing_left();
}

#[test]
fn what_root_keeps_others_can_use_whatever_the_umask() {
    if cannot() {
        return;
    }
    let (place, _up) = Place::kept_under("077", "");
    let sample = place.sample();
    let arguments = ["run", "--name", "umask", "--memory", "2Gi", "--", &sample, "greedy"];
    let mut greedy = Running::start(place.partage(ADA, &arguments));
    greedy.says("refused at 1.5 GiB");
    greedy.signal(libc::SIGTERM);
    assert!(greedy.ended().success());
    place.home.nothing_left();
}

#[test]
fn of_two_keepers_only_one_gives_of_a_gpu() {
    if cannot() {
        return;
    }
    let (ada, bob) = (Place::of(ADA), Place::of(BOB));
    let machine = tempfile::Builder::new().prefix("p").tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(machine.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let node = machine.path().join("node");
    ada.home.fine(&["sim", "env", "--gpus", "1", "--dir", node.to_str().unwrap()]);
    let run = |place: &Place, uid, memory, command: &[&str]| {
        let arguments = [&["run", "--memory", memory, "--"], command].concat();
        let mut run = place.partage(uid, &arguments);
        run.env("PARTAGE_SIM_DIR", &node);
        run
    };
    // One that gives nothing has nothing: its keeper goes on for a while.
    let none = run(&bob, BOB, "90Gi", &["true"]).output().unwrap();
    assert_eq!(none.status.code(), Some(125), "{none:?}");
    let mut first = Running::start(run(&ada, ADA, "4Gi", &["sleep", "1000"]));
    first.says("partage: sleep-1: 4 GiB of GPU 0");
    let second = run(&bob, BOB, "4Gi", &["true"]).output().unwrap();
    let words = String::from_utf8(second.stderr).unwrap();
    assert!(second.status.code() == Some(125) && words.contains("another keeper of this machine"), "{words}");
    first.signal(libc::SIGTERM);
    first.ended();
    eventually("the other one gives of it", || {
        run(&bob, BOB, "4Gi", &["true"]).output().unwrap().status.success().then_some(())
    });
}

#[test]
fn whoever_answers_must_be_root_or_oneself() {
    if cannot() {
        return;
    }
    let place = Place::of(EVE);
    let socket = place.home.path().join("keeper.sock");
    let _listens = as_user(EVE, || std::os::unix::net::UnixListener::bind(&socket).unwrap());
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o777)).unwrap();
    let words = format!("is answered by user {EVE}");
    for arguments in [&["ps"][..], &["run", "--", "true"]] {
        let (_, said) = place.refused(BOB, arguments);
        assert!(said.contains(&words), "{arguments:?}: {said}");
        let (_, said) = place.home.refused(arguments);
        assert!(said.contains(&words), "root, {arguments:?}: {said}");
    }
}
