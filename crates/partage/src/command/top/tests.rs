use super::super::samples::{report, share, texts};
use super::document::document;
use super::rates::Rates;
use super::view::{Options, Sort, foot, lines};
use partage_core::model::Bytes;
use partage_workstation::report::Report;

/// Two seconds later: the trainer used a quarter of the time and was kept waiting for most of it.
fn later(before: &Report) -> Report {
    let mut now = before.clone();
    now.at += 2_000_000_000;
    now.shares[0].parts[0].spent_nanos += 500_000_000;
    now.shares[0].parts[0].throttled_nanos += 1_200_000_000;
    now.shares[1].parts[0].spent_nanos += 100_000_000;
    now
}

fn shown(width: usize, change: impl FnOnce(&mut Options)) -> Vec<String> {
    let before = report();
    let mut options = Options::new(width, true);
    change(&mut options);
    texts(&lines(Some(&before), &later(&before), &options))
}

fn names(shown: &[String]) -> Vec<&str> {
    let shares = shown.iter().skip_while(|line| !line.starts_with("NAME")).skip(1);
    shares.take_while(|line| !line.is_empty()).filter_map(|line| line.split(' ').next()).collect()
}

#[test]
fn a_wide_terminal_shows_everything() {
    assert_eq!(
        shown(140, |_| {}),
        [
            "box: 2 GPUs, 3 shares, 1 waits, simulated driver 550.163.01",
            "",
            "GPU  MODEL           MEMORY              USED  PROMISED      OF  COMPUTE              GOT  PROMISED  TEMP  POWER  HEALTH",
            "  0  A100-SXM4-40GB  ████████▒▒▒·····  20 GiB    28 GiB  40 GiB  █████▒▒▒········  30.0 %      50 %  54 C  121 W  ok",
            "  1  A100-SXM4-40GB  ▒▒··············     0 B     4 GiB  40 GiB  ················   0.0 %       0 %  54 C  121 W  ok",
            "",
            "NAME        USER  GPU  MEMORY       USED   LIMIT     GOT     PROMISED  THROTTLED  REFUSED  NOTE",
            "notebook ⚠  bob     0  ████████  7.9 GiB   8 GiB   5.0 %  20 % ≤100 %      0.0 %        3  bypass suspected: partage inspect notebook",
            "pair        ada     0  ········      0 B   4 GiB   0.0 %            -      0.0 %        0  stopping",
            "pair        ada     1  ········      0 B   4 GiB   0.0 %            -      0.0 %        0  stopping",
            "trainer     ada     0  ██████··   12 GiB  16 GiB  25.0 %         30 %     60.0 %        0",
            "",
            "waits, 1 of 1: late (eve), 20 GiB of 1 GPU: the largest free part is 12 GiB"
        ]
    );
}

#[test]
fn a_usual_terminal_shows_most() {
    assert_eq!(
        shown(80, |_| {}),
        [
            "box: 2 GPUs, 3 shares, 1 waits, simulated driver 550.163.01",
            "",
            "GPU  MEMORY      USED  PROMISED      OF  COMPUTE      GOT  HEALTH",
            "  0  ████▒▒··  20 GiB    28 GiB  40 GiB  ██▒▒····  30.0 %  ok",
            "  1  ▒·······     0 B     4 GiB  40 GiB  ········   0.0 %  ok",
            "",
            "NAME        USER  GPU  MEMORY     USED   LIMIT     GOT     PROMISED  THROTTLED",
            "notebook ⚠  bob     0  ██████  7.9 GiB   8 GiB   5.0 %  20 % ≤100 %      0.0 %",
            "pair        ada     0  ······      0 B   4 GiB   0.0 %            -      0.0 %",
            "pair        ada     1  ······      0 B   4 GiB   0.0 %            -      0.0 %",
            "trainer     ada     0  █████·   12 GiB  16 GiB  25.0 %         30 %     60.0 %",
            "",
            "waits, 1 of 1: late (eve), 20 GiB of 1 GPU: the largest free part is 12 GiB"
        ]
    );
}

#[test]
fn a_narrow_terminal_shows_what_matters_most_and_never_wraps() {
    assert_eq!(
        shown(40, |_| {}),
        [
            "box: 2 GPUs, 3 shares, 1 waits, simulated driver 550.163.01",
            "",
            "GPU  MEMORY      USED     GOT  HEALTH",
            "  0  ████▒▒··  20 GiB  30.0 %  ok",
            "  1  ▒·······     0 B   0.0 %  ok",
            "",
            "NAME           USED     GOT  THROTTLED",
            "notebook ⚠  7.9 GiB   5.0 %      0.0 %",
            "pair            0 B   0.0 %      0.0 %",
            "pair            0 B   0.0 %      0.0 %",
            "trainer      12 GiB  25.0 %     60.0 %",
            "",
            "waits, 1 of 1: late (eve), 20 GiB of 1 GPU: the largest free part is 12 GiB"
        ]
    );
    for width in 1..200 {
        for line in shown(width, |_| {}) {
            // Sentences are cut where they are drawn.
            let free = line.starts_with("box") || line.starts_with("waits");
            assert!(free || line.chars().count() <= width, "{width}: {line}");
        }
    }
}

#[test]
fn without_blocks_everything_is_ascii() {
    let shown = shown(200, |options| options.blocks = false);
    assert!(shown.iter().all(|line| line.is_ascii()), "{shown:?}");
}

#[test]
fn one_report_has_no_rates() {
    let shown = texts(&lines(None, &report(), &Options::new(80, true)));
    assert!(shown.iter().any(|line| line.starts_with("trainer") && line.contains(" - ")), "{shown:?}");
}

#[test]
fn keys_change_the_order() {
    let before = report();
    let mut now = later(&before);
    now.shares[1].parts[0].throttled_nanos += 1_500_000_000;
    now.shares[2].parts[1].spent_nanos += 900_000_000;
    let shown = |options: &Options| texts(&lines(Some(&before), &now, options));
    let mut options = Options::new(80, true);
    for (key, order, sort) in [
        ('m', ["trainer", "notebook", "pair", "pair"], Sort::Memory),
        ('c', ["pair", "pair", "trainer", "notebook"], Sort::Cores),
        ('t', ["notebook", "trainer", "pair", "pair"], Sort::Throttled),
        ('n', ["notebook", "pair", "pair", "trainer"], Sort::Name),
    ] {
        assert!(options.key(key));
        assert_eq!((options.sort, names(&shown(&options))), (sort, order.to_vec()), "{key}");
    }
    assert!(options.key('r') && !options.key('x'));
    assert_eq!(names(&shown(&options)), ["trainer", "pair", "pair", "notebook"]);
    assert_eq!(foot(&options).text(), "q ends  ? keys  sorted by name, reversed");
    assert!(options.key('?'));
    assert!(shown(&options).iter().any(|line| line == "  q  end; Esc and Ctrl-C too"));
}

#[test]
fn a_new_share_of_an_old_name_begins_at_nothing() {
    let before = later(&report());
    let mut now = later(&before);
    let rates = Rates::between(Some(&before), &now);
    assert_eq!((rates.shares[0][0].got, rates.shares[0][0].throttled, rates.gpus[0]), (25.0, 60.0, 30.0));
    // It came just now, and what it spent, it spent since then.
    now.shares[0].since += 1;
    now.shares[0].parts[0].spent_nanos = 200_000_000;
    now.shares[0].parts[0].throttled_nanos = 99_000_000_000;
    let rates = Rates::between(Some(&before), &now);
    assert_eq!(
        (rates.shares[0][0].got, rates.shares[0][0].throttled),
        (10.0, 90.0),
        "what it had, it did not wait for"
    );
    assert!(!Rates::between(None, &now).are_known());
}

#[test]
fn a_machine_with_nothing_on_it_says_what_to_do() {
    let mut report = report();
    (report.shares, report.waiting) = (Vec::new(), Vec::new());
    report.gpus[1].unhealthy = Some("XID 79: it has fallen off the bus".into());
    report.gpus[1].strangers = vec![5, 6];
    report.keeper.warnings = vec!["the settings file is ignored".into()];
    let shown = texts(&lines(None, &report, &Options::new(120, true)));
    assert_eq!(shown[1], "⚠ the settings file is ignored");
    assert!(shown[5].ends_with("  XID 79: it has …"), "{shown:?}");
    assert_eq!(shown.last().unwrap(), "no shares: partage run --memory 4Gi -- COMMAND starts one");
}

#[test]
fn of_a_hundred_shares_the_largest_comes_first() {
    let mut before = report();
    before.shares = (0..100).map(|number| share(&format!("s{number}"), "ada", &[0], 1, 1)).collect();
    let mut now = later(&before);
    now.shares[7].parts[0].used_bytes = Bytes(1 << 30);
    let mut options = Options::new(120, true);
    options.sort = Sort::Memory;
    assert_eq!(names(&texts(&lines(Some(&before), &now, &options)))[..3], ["s7", "s0", "s1"]);
}

#[test]
fn programs_get_the_rates_beside_what_was_reported() {
    let before = report();
    let mut document = document(&before, &later(&before)).unwrap();
    assert_eq!(document["intervalSeconds"], 2.0);
    assert_eq!(
        (&document["gpus"][0]["gotPercent"], &document["gpus"][1]["gotPercent"]),
        (&30.0.into(), &0.0.into())
    );
    let part = &document["shares"][0]["parts"][0];
    assert_eq!((&part["gotPercent"], &part["throttledPercent"]), (&25.0.into(), &60.0.into()));
    // Whoever knows reports reads it as one.
    document["intervalSeconds"].take();
    assert_eq!(serde_json::from_value::<Report>(document).unwrap(), later(&before));
}
