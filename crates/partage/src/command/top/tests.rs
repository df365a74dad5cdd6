use super::super::test_reports::{report, share, texts};
use super::json_report::json_report;
use super::rates::UsageRates;
use super::view::{SortKey, ViewOptions, footer, lines};
use partage_core::model::Bytes;
use partage_workstation::report::MachineReport;

/// Returns a report from two seconds later: the trainer used a quarter of the time and was throttled for most of the rest.
fn later(before: &MachineReport) -> MachineReport {
    let mut now = before.clone();
    now.at += 2_000_000_000;
    now.shares[0].gpu_shares[0].spent_nanos += 500_000_000;
    now.shares[0].gpu_shares[0].throttled_nanos += 1_200_000_000;
    now.shares[1].gpu_shares[0].spent_nanos += 100_000_000;
    now
}

fn shown(width: usize, change: impl FnOnce(&mut ViewOptions)) -> Vec<String> {
    let before = report();
    let mut options = ViewOptions::new(width, true);
    change(&mut options);
    texts(&lines(Some(&before), &later(&before), &options))
}

fn names(shown: &[String]) -> Vec<&str> {
    let shares = shown.iter().skip_while(|line| !line.starts_with("NAME")).skip(1);
    shares.take_while(|line| !line.is_empty()).filter_map(|line| line.split(' ').next()).collect()
}

#[test]
fn wide_terminal_shows_all_columns() {
    assert_eq!(
        shown(140, |_| {}),
        [
            "box: 2 GPUs, 3 shares, 1 queued, simulated driver 550.163.01",
            "",
            "GPU  MODEL           MEMORY              USED  ALLOCATED   TOTAL  COMPUTE             UTIL  GUARANTEED  TEMP  POWER  HEALTH",
            "  0  A100-SXM4-40GB  ████████▒▒▒·····  20 GiB     28 GiB  40 GiB  █████▒▒▒········  30.0 %        50 %  54 C  121 W  ok",
            "  1  A100-SXM4-40GB  ▒▒··············     0 B      4 GiB  40 GiB  ················   0.0 %         0 %  54 C  121 W  ok",
            "",
            "NAME        USER  GPU  MEMORY       USED   LIMIT    UTIL   GUARANTEED  THROTTLED  REFUSED  NOTE",
            "notebook ⚠  bob     0  ████████  7.9 GiB   8 GiB   5.0 %  20 % ≤100 %      0.0 %        3  bypass suspected: partage inspect notebook",
            "pair        ada     0  ········      0 B   4 GiB   0.0 %            -      0.0 %        0  stopping",
            "pair        ada     1  ········      0 B   4 GiB   0.0 %            -      0.0 %        0  stopping",
            "trainer     ada     0  ██████··   12 GiB  16 GiB  25.0 %         30 %     60.0 %        0",
            "",
            "queued 1 of 1: late (eve), 20 GiB of 1 GPU: the largest free share is 12 GiB"
        ]
    );
}

#[test]
fn terminal_of_80_columns_drops_few_columns() {
    assert_eq!(
        shown(80, |_| {}),
        [
            "box: 2 GPUs, 3 shares, 1 queued, simulated driver 550.163.01",
            "",
            "GPU  MEMORY      USED  ALLOCATED   TOTAL  COMPUTE     UTIL  HEALTH",
            "  0  ████▒▒··  20 GiB     28 GiB  40 GiB  ██▒▒····  30.0 %  ok",
            "  1  ▒·······     0 B      4 GiB  40 GiB  ········   0.0 %  ok",
            "",
            "NAME        USER  GPU  MEMORY     USED   LIMIT    UTIL   GUARANTEED  THROTTLED",
            "notebook ⚠  bob     0  ██████  7.9 GiB   8 GiB   5.0 %  20 % ≤100 %      0.0 %",
            "pair        ada     0  ······      0 B   4 GiB   0.0 %            -      0.0 %",
            "pair        ada     1  ······      0 B   4 GiB   0.0 %            -      0.0 %",
            "trainer     ada     0  █████·   12 GiB  16 GiB  25.0 %         30 %     60.0 %",
            "",
            "queued 1 of 1: late (eve), 20 GiB of 1 GPU: the largest free share is 12 GiB"
        ]
    );
}

#[test]
fn narrow_terminal_keeps_essential_columns_and_never_wraps() {
    assert_eq!(
        shown(40, |_| {}),
        [
            "box: 2 GPUs, 3 shares, 1 queued, simulated driver 550.163.01",
            "",
            "GPU  MEMORY      USED    UTIL  HEALTH",
            "  0  ████▒▒··  20 GiB  30.0 %  ok",
            "  1  ▒·······     0 B   0.0 %  ok",
            "",
            "NAME           USED    UTIL  THROTTLED",
            "notebook ⚠  7.9 GiB   5.0 %      0.0 %",
            "pair            0 B   0.0 %      0.0 %",
            "pair            0 B   0.0 %      0.0 %",
            "trainer      12 GiB  25.0 %     60.0 %",
            "",
            "queued 1 of 1: late (eve), 20 GiB of 1 GPU: the largest free share is 12 GiB"
        ]
    );
    for width in 1..200 {
        for line in shown(width, |_| {}) {
            // Sentences are cut when they are drawn.
            let free = line.starts_with("box") || line.starts_with("queued");
            assert!(free || line.chars().count() <= width, "{width}: {line}");
        }
    }
}

#[test]
fn view_without_unicode_is_ascii() {
    let shown = shown(200, |options| options.unicode = false);
    assert!(shown.iter().all(|line| line.is_ascii()), "{shown:?}");
}

#[test]
fn single_report_has_no_rates() {
    let shown = texts(&lines(None, &report(), &ViewOptions::new(80, true)));
    assert!(shown.iter().any(|line| line.starts_with("trainer") && line.contains(" - ")), "{shown:?}");
}

#[test]
fn keys_change_the_sort_order() {
    let before = report();
    let mut now = later(&before);
    now.shares[1].gpu_shares[0].throttled_nanos += 1_500_000_000;
    now.shares[2].gpu_shares[1].spent_nanos += 900_000_000;
    let shown = |options: &ViewOptions| texts(&lines(Some(&before), &now, options));
    let mut options = ViewOptions::new(80, true);
    for (key, order, sort) in [
        ('m', ["trainer", "notebook", "pair", "pair"], SortKey::Memory),
        ('c', ["pair", "pair", "trainer", "notebook"], SortKey::Cores),
        ('t', ["notebook", "trainer", "pair", "pair"], SortKey::Throttled),
        ('n', ["notebook", "pair", "pair", "trainer"], SortKey::Name),
    ] {
        assert!(options.apply_key(key));
        assert_eq!((options.sort, names(&shown(&options))), (sort, order.to_vec()), "{key}");
    }
    assert!(options.apply_key('r') && !options.apply_key('x'));
    assert_eq!(names(&shown(&options)), ["trainer", "pair", "pair", "notebook"]);
    assert_eq!(footer(&options).text(), "q quit  ? keys  sorted by name, reversed");
    assert!(options.apply_key('?'));
    assert!(shown(&options).iter().any(|line| line == "  q  quit, also Esc and Ctrl-C"));
}

#[test]
fn rates_of_a_restarted_share_start_at_zero() {
    let before = later(&report());
    let mut now = later(&before);
    let rates = UsageRates::between(Some(&before), &now);
    assert_eq!((rates.shares[0][0].used, rates.shares[0][0].throttled, rates.gpus[0]), (25.0, 60.0, 30.0));
    // A share that has just started: all its time belongs to this interval.
    now.shares[0].since += 1;
    now.shares[0].gpu_shares[0].spent_nanos = 200_000_000;
    now.shares[0].gpu_shares[0].throttled_nanos = 99_000_000_000;
    let rates = UsageRates::between(Some(&before), &now);
    assert_eq!(
        (rates.shares[0][0].used, rates.shares[0][0].throttled),
        (10.0, 90.0),
        "time with the GPU is not throttled time"
    );
    assert!(!UsageRates::between(None, &now).are_known());
}

#[test]
fn empty_machine_shows_health_and_hint() {
    let mut report = report();
    (report.shares, report.waiting) = (Vec::new(), Vec::new());
    report.gpus[1].unhealthy = Some("XID 79: fell off the bus".into());
    report.gpus[1].unowned_processes = vec![5, 6];
    report.daemon.warnings = vec!["the settings file is ignored".into()];
    let shown = texts(&lines(None, &report, &ViewOptions::new(120, true)));
    assert_eq!(shown[1], "⚠ the settings file is ignored");
    assert!(shown[5].ends_with("  XID 79: fell off …"), "{shown:?}");
    assert_eq!(shown.last().unwrap(), "no shares; start one with: partage run --memory 4Gi -- COMMAND");
}

#[test]
fn sort_by_memory_puts_the_largest_share_first() {
    let mut before = report();
    before.shares = (0..100).map(|number| share(&format!("s{number}"), "ada", &[0], 1, 1)).collect();
    let mut now = later(&before);
    now.shares[7].gpu_shares[0].used_bytes = Bytes(1 << 30);
    let mut options = ViewOptions::new(120, true);
    options.sort = SortKey::Memory;
    assert_eq!(names(&texts(&lines(Some(&before), &now, &options)))[..3], ["s7", "s0", "s1"]);
}

#[test]
fn json_report_adds_rates_to_the_report() {
    let before = report();
    let mut document = json_report(&before, &later(&before)).unwrap();
    assert_eq!(document["intervalSeconds"], 2.0);
    assert_eq!(
        (&document["gpus"][0]["usedPercent"], &document["gpus"][1]["usedPercent"]),
        (&30.0.into(), &0.0.into())
    );
    let gpu_share = &document["shares"][0]["gpuShares"][0];
    assert_eq!((&gpu_share["usedPercent"], &gpu_share["throttledPercent"]), (&25.0.into(), &60.0.into()));
    // The document can still be read as a report.
    document["intervalSeconds"].take();
    assert_eq!(serde_json::from_value::<MachineReport>(document).unwrap(), later(&before));
}
