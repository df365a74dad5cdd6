use super::*;

fn refused<T: std::fmt::Debug>(parse: fn(&str) -> Result<T, String>, mistakes: &[(&str, &str)]) {
    for (text, words) in mistakes {
        assert_eq!(parse(text).unwrap_err(), *words, "{text}");
    }
}

#[test]
fn memory_is_read_as_kubernetes_reads_it() {
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
        assert_eq!(memory(text), Ok(Bytes(bytes)), "{text}");
    }
}

#[test]
fn misspelt_memory_is_answered_with_the_right_spelling() {
    const LIKE: &str = "write it like 4Gi (4 x 2^30 bytes), 500Mi or 4G (4 x 10^9 bytes)";
    for text in ["5gb", "5GB", "5 GiB", "5g", "5gib", "5Gb", "5gi", "5 Gi", "5 gigabytes", "5gigs", "5GIG"] {
        let words = format!("{text} is no amount of memory: write 5Gi (5 x 2^30 bytes) or 5G (5 x 10^9)");
        assert_eq!(memory(text).unwrap_err(), words);
    }
    for text in ["", "lots", "Gi", "5x", "5..5Gi", "5Gii", "0x10", "5 bananas", "{{ memory }}"] {
        assert_eq!(memory(text).unwrap_err(), format!("{text} is no amount of memory: {LIKE}"));
    }
    refused(
        memory,
        &[
            ("5,5gb", "5,5gb is no amount of memory: write 5.5Gi (5.5 x 2^30 bytes) or 5.5G (5.5 x 10^9)"),
            ("500mb", "500mb is no amount of memory: write 500Mi (500 x 2^20 bytes) or 500M (500 x 10^6)"),
            ("500m", "500m is no amount of memory: write 500Mi (500 x 2^20 bytes) or 500M (500 x 10^6)"),
            ("900kb", "900kb is no amount of memory: write 900Ki (900 x 2^10 bytes) or 900k (900 x 10^3)"),
            ("25%", "25% is no amount of memory: use --memory-percent 25"),
            ("8", "8 is 8 B of memory: did you mean 8Gi?"),
            ("4096", "4096 is 4 KiB of memory: did you mean 4096Mi?"),
            ("0", "no memory is no share: write it like 4Gi, or leave it out"),
            ("0Gi", "0Gi is 0 B of memory, which no program can use: write it like 4Gi"),
            ("5Ki", "5Ki is 5 KiB of memory, which no program can use: write it like 4Gi"),
            ("-5Gi", "-5Gi is less than nothing: write it like 4Gi"),
            ("99999Ei", "99999Ei is more memory than can be counted: write it like 4Gi"),
        ],
    );
}

#[test]
fn percents_are_whole_and_at_most_all() {
    assert_eq!((percent("25"), percent("100%"), percent(" 1 % ")), (Ok(25), Ok(100), Ok(1)));
    for text in ["0", "101", "-1", "2.5", "", "%", "a quarter", "4294967297"] {
        let words = format!("{text} is no percentage: write a whole number from 1 to 100");
        assert_eq!(percent(text).unwrap_err(), words);
    }
}

#[test]
fn cores_are_percents_of_one_gpu() {
    for (text, milli) in
        [("30", 30_000), ("30%", 30_000), ("30 %", 30_000), ("12.5", 12_500), ("100", 100_000), ("1", 1000)]
    {
        assert_eq!(cores(text).unwrap().as_millipercent(), milli, "{text}");
        assert_eq!(cores_of_each(text).unwrap().as_millipercent(), milli, "{text}");
    }
    refused(
        cores,
        &[
            ("150", "150 is more than one GPU: use --gpus 2 --cores 75"),
            ("150%", "150% is more than one GPU: use --gpus 2 --cores 75"),
            ("101", "101 is more than one GPU: use --gpus 2 --cores 51"),
            ("100.5", "100.5 is more than one GPU: use --gpus 2 --cores 51"),
            ("250", "250 is more than one GPU: use --gpus 3 --cores 84"),
            ("5000", "5000 is more than one GPU: use 1 to 100, and --gpus for more than one"),
            (
                "18446744073709551615",
                "18446744073709551615 is more than one GPU: use 1 to 100, and --gpus for more than one",
            ),
            ("0", "0 is no compute at all: use 1 to 100, or leave it out to promise none"),
            (
                "0.5",
                "0.5 is less than a percent of a GPU: did you mean 50? Cores are percents, from 1 to 100",
            ),
            ("12,5", "12,5 is written 12.5 here"),
        ],
    );
    refused(
        cores_of_each,
        &[("150", "150 is more than one GPU: use 1 to 100; it is meant of each GPU that the share has")],
    );
    for text in ["", "half", "-5", "1.2345", "100.0000", "1e1", "99999999999999999999"] {
        let words = format!(
            "{text} is no part of a GPU's compute: write percents from 1 to 100, like 30 or 12.5 (at most 3 decimals)"
        );
        assert_eq!(cores(text).unwrap_err(), words);
    }
}

#[test]
fn times_have_a_unit() {
    for (text, millis) in
        [("10s", 10_000), ("500ms", 500), ("2m", 120_000), ("1h", 3_600_000), ("1.5s", 1500), ("0s", 0)]
    {
        assert_eq!(duration(text), Ok(Duration::from_millis(millis)), "{text}");
    }
    refused(
        duration,
        &[
            ("10", "10 of what? Write 10s for seconds, or 10ms or 10m"),
            ("10 s", "10 s is no time: write 10s"),
            ("10sec", "10sec is no time: write 10s"),
            ("2min", "2min is no time: write 2m"),
            ("10S", "10S is no time: write 10s"),
            ("1,5s", "1,5s is no time: write 1.5s"),
            ("soon", "soon is no time: write it like 10s, 500ms or 2m"),
            ("s", "s is no time: write it like 10s, 500ms or 2m"),
            ("-1s", "-1s is no time: write it like 10s, 500ms or 2m"),
            ("1..5s", "1..5s is no time: write it like 10s, 500ms or 2m"),
            ("", " is no time: write it like 10s, 500ms or 2m"),
            ("99999999999999999999h", "99999999999999999999h is longer than a week: write less"),
        ],
    );
}

#[test]
fn an_interval_may_be_bare_seconds() {
    assert_eq!(
        (interval("2"), interval("0.5")),
        (Ok(Duration::from_secs(2)), Ok(Duration::from_millis(500)))
    );
    assert_eq!(interval("250ms"), Ok(Duration::from_millis(250)));
    refused(
        interval,
        &[
            ("0", "use 50ms to 1h"),
            ("2h", "use 50ms to 1h"),
            ("x", "x is no time: write it like 2s, 500ms or 1m"),
            ("", " is no time: write it like 2s, 500ms or 1m"),
        ],
    );
}
