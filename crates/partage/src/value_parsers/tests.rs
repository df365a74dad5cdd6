use super::*;

fn assert_refused<T: std::fmt::Debug>(parse: fn(&str) -> Result<T, String>, mistakes: &[(&str, &str)]) {
    for (text, error) in mistakes {
        assert_eq!(parse(text).unwrap_err(), *error, "{text}");
    }
}

#[test]
fn memory_is_parsed_as_kubernetes_quantity() {
    for (text, bytes) in [
        ("4Gi", 4 << 30),
        ("500Mi", 500 << 20),
        ("4G", 4_000_000_000),
        ("1.5Gi", 3 << 29),
        (" 1Ti ", 1 << 40),
        ("2048Ki", 2 << 20),
        ("4294967296", 4 << 30),
        ("4e9", 4_000_000_000),
    ] {
        assert_eq!(parse_memory(text), Ok(Bytes(bytes)), "{text}");
    }
}

#[test]
fn misspelled_memory_error_gives_correct_spelling() {
    for text in ["5gb", "5GB", "5 GiB", "5g", "5gib", "5Gb", "5gi", "5 Gi", "5 gigabytes", "5gigs", "5GIG"] {
        assert_eq!(parse_memory(text).unwrap_err(), "write 5Gi (5 x 2^30 bytes) or 5G (5 x 10^9 bytes)");
    }
    for text in ["", "lots", "Gi", "5x", "5..5Gi", "5Gii", "0x10", "5 bananas", "{{ memory }}"] {
        let expected = "write it like 4Gi (4 x 2^30 bytes), 500Mi or 4G (4 x 10^9 bytes)";
        assert_eq!(parse_memory(text).unwrap_err(), expected, "{text}");
    }
    assert_refused(
        parse_memory,
        &[
            ("5,5gb", "write 5.5Gi (5.5 x 2^30 bytes) or 5.5G (5.5 x 10^9 bytes)"),
            ("500mb", "write 500Mi (500 x 2^20 bytes) or 500M (500 x 10^6 bytes)"),
            ("500m", "write 500Mi (500 x 2^20 bytes) or 500M (500 x 10^6 bytes)"),
            ("900kb", "write 900Ki (900 x 2^10 bytes) or 900k (900 x 10^3 bytes)"),
            ("25%", "for a percentage use --memory-percent 25"),
            ("8", "8 B is too little: did you mean 8Gi?"),
            ("4096", "4 KiB is too little: did you mean 4096Mi?"),
            ("0", "memory cannot be 0: write it like 4Gi, or omit the option"),
            ("0Gi", "0 B is less than the minimum of 1 MiB: write it like 4Gi"),
            ("5Ki", "5 KiB is less than the minimum of 1 MiB: write it like 4Gi"),
            ("-5Gi", "memory cannot be negative: write it like 4Gi"),
            ("99999Ei", "the amount is too large: write it like 4Gi"),
        ],
    );
}

#[test]
fn percentage_outside_1_to_100_is_refused() {
    assert_eq!(
        (parse_percent("25"), parse_percent("100%"), parse_percent(" 1 % ")),
        (Ok(25), Ok(100), Ok(1))
    );
    for text in ["0", "101", "-1", "2.5", "", "%", "a quarter", "4294967297"] {
        assert_eq!(parse_percent(text).unwrap_err(), "use a whole number from 1 to 100", "{text}");
    }
}

#[test]
fn cores_are_percentages_of_one_gpu() {
    for (text, milli) in
        [("30", 30_000), ("30%", 30_000), ("30 %", 30_000), ("12.5", 12_500), ("100", 100_000), ("1", 1000)]
    {
        assert_eq!(parse_cores(text).unwrap().as_millipercent(), milli, "{text}");
        assert_eq!(parse_cores_per_gpu(text).unwrap().as_millipercent(), milli, "{text}");
    }
    assert_refused(
        parse_cores,
        &[
            ("150", "more than one GPU: use --gpus 2 --cores 75"),
            ("150%", "more than one GPU: use --gpus 2 --cores 75"),
            ("101", "more than one GPU: use --gpus 2 --cores 51"),
            ("100.5", "more than one GPU: use --gpus 2 --cores 51"),
            ("250", "more than one GPU: use --gpus 3 --cores 84"),
            ("5000", "more than one GPU: use 1 to 100, and --gpus for more than one GPU"),
            ("18446744073709551615", "more than one GPU: use 1 to 100, and --gpus for more than one GPU"),
            ("0", "cores cannot be 0: use 1 to 100, or omit the option for no guarantee"),
            ("0.5", "less than 1 % of a GPU: did you mean 50? Cores are percentages from 1 to 100"),
            ("12,5", "write 12.5, with a decimal point"),
        ],
    );
    assert_refused(
        parse_cores_per_gpu,
        &[("150", "more than one GPU: use 1 to 100; the value applies to each GPU of the share")],
    );
    for text in ["", "half", "-5", "1.2345", "100.0000", "1e1", "99999999999999999999"] {
        let expected = "use a percentage from 1 to 100, such as 30 or 12.5 (at most 3 decimals)";
        assert_eq!(parse_cores(text).unwrap_err(), expected, "{text}");
    }
}

#[test]
fn duration_without_unit_is_refused() {
    for (text, millis) in
        [("10s", 10_000), ("500ms", 500), ("2m", 120_000), ("1h", 3_600_000), ("1.5s", 1500), ("0s", 0)]
    {
        assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)), "{text}");
    }
    assert_refused(
        parse_duration,
        &[
            ("10", "the unit is missing: write 10s for seconds, or 10ms or 10m"),
            ("10 s", "write 10s"),
            ("10sec", "write 10s"),
            ("2min", "write 2m"),
            ("10S", "write 10s"),
            ("1,5s", "write 1.5s"),
            ("soon", "write it like 10s, 500ms or 2m"),
            ("s", "write it like 10s, 500ms or 2m"),
            ("-1s", "write it like 10s, 500ms or 2m"),
            ("1..5s", "write it like 10s, 500ms or 2m"),
            ("", "write it like 10s, 500ms or 2m"),
            ("99999999999999999999h", "longer than the maximum of a week (168h)"),
        ],
    );
}

#[test]
fn interval_without_unit_is_seconds() {
    assert_eq!(
        (parse_interval("2"), parse_interval("0.5")),
        (Ok(Duration::from_secs(2)), Ok(Duration::from_millis(500)))
    );
    assert_eq!(parse_interval("250ms"), Ok(Duration::from_millis(250)));
    assert_refused(
        parse_interval,
        &[
            ("0", "use 50ms to 1h"),
            ("2h", "use 50ms to 1h"),
            ("x", "write it like 2s, 500ms or 1m"),
            ("", "write it like 2s, 500ms or 1m"),
        ],
    );
}

#[test]
fn priority_is_a_whole_number_up_to_the_highest() {
    assert_eq!((parse_priority("0"), parse_priority("10")), (Ok(0), Ok(10)));
    let hint = "use a whole number from 0 to 10";
    assert_refused(parse_priority, &[("11", hint), ("-1", hint), ("+1", hint), ("high", hint), ("", hint)]);
}
