//! The programs of the zoo in hard shares alone, and beside each other in pairs.

use crate::Options;
use crate::measure::{Access, load, measure};
use crate::pairs::{
    Entitlement, QUICK_PAIRS, SPLITS, demand, kernel_points, length, measure_bare_pair, measure_pair, tenant,
};
use crate::programs::{PROGRAMS, named};
use std::collections::HashMap;

/// Runs the zoo; returns the number of bounds that are missed.
pub fn all(options: &Options) -> usize {
    let wanted = |name: &str| options.only.as_ref().is_none_or(|only| name.contains(only.as_str()));
    let mut missed = 0;
    println!("zoo, alone in a hard share of 30 %: {} s each, load {}", options.pair_seconds, load());
    println!(
        "{:<20} {:>12} {:>10} {:>8} {:>8} {:>9}",
        "program", "bare demand", "entitled", "got", "error", "charged"
    );
    let mut demands = HashMap::new();
    for program in PROGRAMS.iter().filter(|program| wanted(program.name)) {
        let alone = demand(program, options.pair_seconds);
        demands.insert(program.name, alone);
        let length = length(&[program], options.pair_seconds);
        let got = measure(&[tenant(program, 30, true)], Access::Shares, length)[0];
        let (got, charged) = (got.percent, got.charged_percent);
        let entitled = Entitlement::new(30, alone.percent);
        let error = entitled.error(got);
        missed += usize::from(error.abs() > kernel_points(&[program], length).max(1.0));
        println!(
            "{:<20} {:>12.1} {:>10} {got:>8.2} {error:>8.2} {charged:>9.2}",
            program.name,
            alone.percent,
            range(&entitled)
        );
    }
    println!();
    let every = || -> Vec<(&str, &str)> {
        let names = PROGRAMS.each_ref().map(|program| program.name);
        (0..names.len()).flat_map(|a| (a..names.len()).map(move |b| (names[a], names[b]))).collect()
    };
    let pairs = if options.quick_pairs { QUICK_PAIRS.to_vec() } else { every() };
    println!("zoo, pairs: {} s each, load {}; percent of the GPU", options.pair_seconds, load());
    println!(
        "{:<36} {:>6} {:>19} {:>11} {:>11} {:>10} {:>7} {:>10}",
        "pair", "split", "entitled", "got", "bare", "error", "total %", "progress %"
    );
    let (mut errors, mut strict, mut totals) = (Vec::new(), Vec::new(), Vec::new());
    for (first, second) in pairs {
        if !wanted(first) && !wanted(second) {
            continue;
        }
        let pair = [named(first).unwrap(), named(second).unwrap()];
        let alone = pair.map(|program| {
            *demands.entry(program.name).or_insert_with(|| demand(program, options.pair_seconds))
        });
        let length = length(&pair, options.pair_seconds);
        let bare = measure_bare_pair(pair, length);
        for split in SPLITS {
            let result = measure_pair(pair, split, alone, &bare, length);
            let two = |values: [f64; 2]| format!("{:.1} {:.1}", values[0], values[1]);
            println!(
                "{:<36} {:>6} {:>19} {:>11} {:>11} {:>10} {:>7.1} {:>10.1}",
                format!("{first} + {second}"),
                format!("{}/{}{}", split.cores[0], split.cores[1], if split.hard { "h" } else { "" }),
                result.entitled.each_ref().map(range).join(" "),
                two(result.got),
                two([bare[0].percent, bare[1].percent]),
                two(result.errors),
                result.total,
                result.progress,
            );
            let kernel = kernel_points(&pair, length);
            // One kernel more or less is not an error of the throttle.
            errors.extend(
                result.errors.map(|error| if kernel > 3.0 { (error - kernel).max(0.0) } else { error }),
            );
            strict.extend(result.strict_errors);
            totals.push(result.total);
        }
    }
    let count = errors.len().max(1) as f64;
    let mean = errors.iter().sum::<f64>() / count;
    let worst = errors.iter().copied().fold(0.0, f64::max);
    let total = totals.iter().copied().fold(f64::INFINITY, f64::min);
    let mean_total = totals.iter().sum::<f64>() / totals.len().max(1) as f64;
    println!(
        "pairs: mean error {mean:.2} points (at most 1), worst {worst:.2} (at most 3), over 3 points {} of {}; total \
         {mean_total:.1} % of reachable on average, {total:.1} % in the worst pair (at least 95)",
        errors.iter().filter(|error| **error > 3.0).count(),
        errors.len(),
    );
    println!(
        "  if pauses did not count: mean error {:.2} points, worst {:.2}",
        strict.iter().sum::<f64>() / count,
        strict.iter().copied().fold(0.0, f64::max)
    );
    missed + usize::from(mean > 1.0) + usize::from(worst > 3.0) + usize::from(total < 95.0)
}

fn range(entitled: &Entitlement) -> String {
    let Entitlement { least, most } = entitled;
    if most - least < 0.1 { format!("{most:.1}") } else { format!("{least:.1}-{most:.1}") }
}
