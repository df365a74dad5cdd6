//! `nvidia-smi` of 535 and 550: lists, tables and watches.

mod faults;
mod fields;
mod topology;

use crate::stage::{Stage, mib};
use partage_testkit::eventually;
use partage_testkit::sim_node::Workload;

const A100: &str = "A100-SXM4-40GB";

#[test]
fn lists_gpus_by_name_and_uuid() {
    for stage in Stage::both(A100, 8) {
        let gpus = &stage.node.config().gpus;
        let expected: String = gpus
            .iter()
            .enumerate()
            .map(|(index, gpu)| format!("GPU {index}: NVIDIA A100-SXM4-40GB (UUID: {})\n", gpu.uuid))
            .collect();
        assert_eq!(stage.smi(&["-L"]).well(), expected);
    }
}

/// The cells of a table's lines, without the frame.
pub(crate) fn cells(line: &str) -> Vec<&str> {
    line.split('|').map(str::trim).filter(|cell| !cell.is_empty()).collect()
}

#[test]
fn shows_gpus_and_processes_in_a_table() {
    for stage in Stage::both(A100, 3) {
        let workload = stage.workload(1, 3072, 0);
        let table = stage.smi(&[]).well();
        let version = stage.driver().version();
        let cuda = stage.driver().cuda();
        let header = table.lines().nth(2).unwrap();
        let words: Vec<&str> = cells(header)[0].split_whitespace().collect();
        let expected = format!(
            "NVIDIA-SMI {version} Driver Version: {version} CUDA Version: {}.{}",
            cuda / 1000,
            cuda % 1000 / 10
        );
        assert_eq!(words.join(" "), expected);
        let held = mib(stage.held(3072));
        for (index, gpu) in stage.node.config().gpus.iter().enumerate() {
            let start = format!("|   {index}  NVIDIA A100-SXM4-40GB ");
            let mut lines = table.lines().skip_while(|line| !line.starts_with(&start));
            let (name, figures, mig) =
                (lines.next().expect(&table), lines.next().unwrap(), lines.next().unwrap());
            // No display, and no error that ECC could not mend.
            assert_eq!(cells(name)[1..], [format!("{} Off", gpu.pci), "0".to_string()], "{table}");
            let used = if index == 1 { held } else { 0 };
            let memory = figures.split('|').nth(2).unwrap().replace(' ', "");
            assert_eq!(memory, format!("{used}MiB/40960MiB"), "{table}");
            assert!(figures.contains("    0%      Default |"), "{table}");
            assert_eq!(cells(mig), ["Disabled"], "{table}");
        }
        let process = table.lines().rev().nth(1).unwrap();
        let words: Vec<&str> = cells(process)[0].split_whitespace().collect();
        let (pid, memory) = (workload.pid().to_string(), format!("{held}MiB"));
        assert_eq!(words, ["1", "N/A", "N/A", &pid, "C", Workload::NAME, &memory], "{table}");
        drop(workload);
        assert!(stage.smi(&[]).well().contains("No running processes found"));
    }
}

#[tokio::test]
async fn shows_a_gpu_that_is_busy() {
    for stage in Stage::both(A100, 2) {
        let _workload = stage.workload(1, 0, 100);
        let card = stage.node.card(0).unwrap();
        let (cool, warm) = (card.temperature.idle, card.temperature.load);
        let (idle, busy) = eventually("GPU 1 is used all the time", async || {
            let table = stage.smi(&[]).well();
            let lines: Vec<&str> = table.lines().filter(|line| line.contains("Default |")).collect();
            let works = lines[1].contains("100%") && lines[1].contains(&format!(" {warm}C "));
            if works { Ok((lines[0].to_string(), lines[1].to_string())) } else { Err(table) }
        })
        .await;
        assert!(idle.contains(&format!(" {cool}C ")) && idle.contains(" 0% "), "{idle}");
        assert!(idle.contains(&format!(" {}W / ", card.power.idle / 1000)), "{idle}");
        let draws = busy.split_once("W /").unwrap().0.rsplit(' ').next().unwrap().parse::<u32>().unwrap();
        assert!(
            (card.power.default_limit / 2..=card.power.default_limit).contains(&(draws * 1000)),
            "{busy}"
        );
    }
}

#[test]
fn lists_processes_with_their_gpus() {
    for stage in Stage::both(A100, 2) {
        let workloads =
            [(0, 1024), (1, 2048), (1, 512)].map(|(gpu, mib)| (gpu, mib, stage.workload(gpu, mib, 0)));
        let fields = "pid,name,used_memory,gpu_uuid,gpu_name,gpu_bus_id,gpu_serial";
        let query = format!("--query-compute-apps={fields}");
        let rows: String = workloads
            .iter()
            .map(|(gpu, memory, workload)| {
                let truth = &stage.node.config().gpus[*gpu as usize];
                let (pid, held) = (workload.pid(), mib(stage.held(*memory)));
                let (uuid, pci, serial) = (&truth.uuid, truth.pci, &truth.serial);
                format!(
                    "{pid}, {}, {held} MiB, {uuid}, NVIDIA A100-SXM4-40GB, {pci}, {serial}\n",
                    Workload::NAME
                )
            })
            .collect();
        let header = "pid, process_name, used_gpu_memory [MiB], gpu_uuid, gpu_name, gpu_bus_id, gpu_serial\n";
        assert_eq!(stage.smi(&[&query, "--format=csv"]).well(), format!("{header}{rows}"));
        let bare = stage.smi(&[&query, "--format=csv,noheader,nounits"]).well();
        assert_eq!(bare, rows.replace(" MiB", ""));
        let of_gpu = stage.smi(&["-i", "0", "--query-compute-apps=pid", "--format=csv,noheader"]).well();
        assert_eq!(of_gpu.trim(), workloads[0].2.pid().to_string());
        drop(workloads);
        assert_eq!(stage.smi(&[&query, "--format=csv,noheader"]).well(), "", "the dead are gone");
    }
}

/// The rows of `pmon` and `dmon`, each by the names of its columns.
pub(crate) fn watched(text: &str) -> Vec<std::collections::BTreeMap<&str, &str>> {
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().unwrap().trim_start_matches('#').split_whitespace().collect();
    let rows = lines.filter(|line| !line.starts_with('#'));
    rows.map(|line| names.iter().copied().zip(line.split_whitespace()).collect()).collect()
}

#[tokio::test]
async fn watches_processes() {
    for stage in Stage::both(A100, 2) {
        let (holds, works) = (stage.workload(1, 256, 0), stage.workload(1, 1024, 100));
        let said = eventually("the last second is full", async || {
            let said = stage.smi(&["pmon", "-c", "2", "-s", "um"]).well();
            let full =
                watched(&said).iter().any(|row| row["pid"] == works.pid().to_string() && row["sm"] == "100");
            if full { Ok(said) } else { Err(said) }
        })
        .await;
        let rows = watched(&said);
        assert_eq!(rows.len(), 6, "{said}");
        for row in &rows {
            // Nobody uses the first one.
            if row["gpu"] == "0" {
                assert_eq!(
                    [row["pid"], row["type"], row["sm"], row["fb"], row["command"]],
                    ["-"; 5],
                    "{said}"
                );
                continue;
            }
            let pid: u32 = row["pid"].parse().unwrap();
            let memory = if pid == holds.pid() { 256 } else { 1024 };
            assert!(pid == holds.pid() || pid == works.pid(), "{said}");
            assert_eq!([row["type"], row["ccpm"], row["command"]], ["C", "0", "workload"], "{said}");
            assert_eq!(row["fb"], mib(stage.held(memory)).to_string(), "{said}");
            if pid == holds.pid() {
                assert_eq!([row["sm"], row["mem"]], ["-"; 2], "{said}");
            } else {
                assert_eq!([row["enc"], row["dec"]], ["0"; 2], "{said}");
            }
        }
    }
}

#[tokio::test]
async fn watches_gpus() {
    for stage in Stage::both(A100, 2) {
        let workload = stage.workload(1, 1024, 100);
        let said = eventually("GPU 1 is used all the time", async || {
            let said = stage.smi(&["dmon", "-c", "2", "-s", "pucvmet"]).well();
            let rows = watched(&said);
            if rows.iter().any(|row| row["gpu"] == "1" && row["sm"] == "100") { Ok(said) } else { Err(said) }
        })
        .await;
        drop(workload);
        let card = stage.node.card(0).unwrap();
        let rows = watched(&said);
        assert_eq!(rows.iter().map(|row| row["gpu"]).collect::<Vec<_>>(), ["0", "1", "0", "1"], "{said}");
        for row in rows {
            for column in ["enc", "dec", "jpg", "ofa", "pviol", "tviol", "ccpm", "sbecc", "dbecc", "pci"] {
                assert_eq!(row[column], "0", "{column}: {said}");
            }
            assert_eq!(row["mclk"], card.clocks.memory_max.to_string(), "{said}");
            match row["gpu"] {
                "0" => {
                    let idle = [row["sm"], row["mem"], row["fb"]];
                    assert_eq!(idle, ["0"; 3], "{said}");
                    assert_eq!(row["pwr"], (card.power.idle / 1000).to_string(), "{said}");
                    assert_eq!(row["gtemp"], card.temperature.idle.to_string(), "{said}");
                    assert_eq!(row["pclk"], card.clocks.graphics_idle.to_string(), "{said}");
                }
                _ => assert!(row["fb"].parse::<u64>().unwrap() >= mib(stage.held(1024)), "{said}"),
            }
        }
    }
}
