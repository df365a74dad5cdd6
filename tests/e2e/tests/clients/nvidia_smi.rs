//! `nvidia-smi` of 535 and 550: lists, tables, `pmon` and `dmon`.

mod faults;
mod fields;
mod topology;

use crate::client_node::{ClientNode, mib};
use partage_testkit::eventually;
use partage_testkit::sim_node::WorkloadProcess;

const A100: &str = "A100-SXM4-40GB";

#[test]
fn list_shows_gpus_by_name_and_uuid() {
    for client_node in ClientNode::one_model(A100, 8) {
        let gpus = &client_node.node.config().gpus;
        let expected: String = gpus
            .iter()
            .enumerate()
            .map(|(index, gpu)| format!("GPU {index}: NVIDIA A100-SXM4-40GB (UUID: {})\n", gpu.uuid))
            .collect();
        assert_eq!(client_node.nvidia_smi(&["-L"]).success(), expected);
    }
}

/// Returns the cells of a table line, without the frame.
pub(crate) fn table_cells(line: &str) -> Vec<&str> {
    line.split('|').map(str::trim).filter(|cell| !cell.is_empty()).collect()
}

#[test]
fn table_shows_gpus_and_processes() {
    for client_node in ClientNode::one_model(A100, 3) {
        let workload = client_node.workload(1, 3072, 0);
        let table = client_node.nvidia_smi(&[]).success();
        let version = client_node.driver().version();
        let cuda = client_node.driver().cuda();
        let header = table.lines().nth(2).unwrap();
        let words: Vec<&str> = table_cells(header)[0].split_whitespace().collect();
        let expected = format!(
            "NVIDIA-SMI {version} Driver Version: {version} CUDA Version: {}.{}",
            cuda / 1000,
            cuda % 1000 / 10
        );
        assert_eq!(words.join(" "), expected);
        let held = mib(client_node.memory_with_context(3072));
        for (index, gpu) in client_node.node.config().gpus.iter().enumerate() {
            let start = format!("|   {index}  NVIDIA A100-SXM4-40GB ");
            let mut lines = table.lines().skip_while(|line| !line.starts_with(&start));
            let (name, figures, mig) =
                (lines.next().expect(&table), lines.next().unwrap(), lines.next().unwrap());
            // No display, and no uncorrected ECC error.
            assert_eq!(table_cells(name)[1..], [format!("{} Off", gpu.pci), "0".to_string()], "{table}");
            let used = if index == 1 { held } else { 0 };
            let memory = figures.split('|').nth(2).unwrap().replace(' ', "");
            assert_eq!(memory, format!("{used}MiB/40960MiB"), "{table}");
            assert!(figures.contains("    0%      Default |"), "{table}");
            assert_eq!(table_cells(mig), ["Disabled"], "{table}");
        }
        let process = table.lines().rev().nth(1).unwrap();
        let words: Vec<&str> = table_cells(process)[0].split_whitespace().collect();
        let (pid, memory) = (workload.pid().to_string(), format!("{held}MiB"));
        assert_eq!(words, ["1", "N/A", "N/A", &pid, "C", WorkloadProcess::PROCESS_NAME, &memory], "{table}");
        drop(workload);
        assert!(client_node.nvidia_smi(&[]).success().contains("No running processes found"));
    }
}

#[tokio::test]
async fn table_shows_a_busy_gpu() {
    for client_node in ClientNode::one_model(A100, 2) {
        let _workload = client_node.workload(1, 0, 100);
        let card = client_node.node.card(0).unwrap();
        let (cool, warm) = (card.temperature.idle, card.temperature.load);
        let (idle, busy) = eventually("utilization of GPU 1 is 100 %", async || {
            let table = client_node.nvidia_smi(&[]).success();
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
fn compute_apps_query_lists_processes_with_their_gpus() {
    for client_node in ClientNode::one_model(A100, 2) {
        let workloads =
            [(0, 1024), (1, 2048), (1, 512)].map(|(gpu, mib)| (gpu, mib, client_node.workload(gpu, mib, 0)));
        let fields = "pid,name,used_memory,gpu_uuid,gpu_name,gpu_bus_id,gpu_serial";
        let query = format!("--query-compute-apps={fields}");
        let rows: String = workloads
            .iter()
            .map(|(gpu, memory, workload)| {
                let truth = &client_node.node.config().gpus[*gpu as usize];
                let (pid, held) = (workload.pid(), mib(client_node.memory_with_context(*memory)));
                let (uuid, pci, serial) = (&truth.uuid, truth.pci, &truth.serial);
                format!(
                    "{pid}, {}, {held} MiB, {uuid}, NVIDIA A100-SXM4-40GB, {pci}, {serial}\n",
                    WorkloadProcess::PROCESS_NAME
                )
            })
            .collect();
        let header = "pid, process_name, used_gpu_memory [MiB], gpu_uuid, gpu_name, gpu_bus_id, gpu_serial\n";
        assert_eq!(client_node.nvidia_smi(&[&query, "--format=csv"]).success(), format!("{header}{rows}"));
        let bare = client_node.nvidia_smi(&[&query, "--format=csv,noheader,nounits"]).success();
        assert_eq!(bare, rows.replace(" MiB", ""));
        let of_gpu = client_node
            .nvidia_smi(&["-i", "0", "--query-compute-apps=pid", "--format=csv,noheader"])
            .success();
        assert_eq!(of_gpu.trim(), workloads[0].2.pid().to_string());
        drop(workloads);
        assert_eq!(
            client_node.nvidia_smi(&[&query, "--format=csv,noheader"]).success(),
            "",
            "ended processes are not listed"
        );
    }
}

/// Returns the rows of `pmon` and `dmon`, each by the names of its columns.
pub(crate) fn parse_monitor_rows(text: &str) -> Vec<std::collections::BTreeMap<&str, &str>> {
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().unwrap().trim_start_matches('#').split_whitespace().collect();
    let rows = lines.filter(|line| !line.starts_with('#'));
    rows.map(|line| names.iter().copied().zip(line.split_whitespace()).collect()).collect()
}

#[tokio::test]
async fn pmon_shows_process_utilization() {
    for client_node in ClientNode::one_model(A100, 2) {
        let (holds, works) = (client_node.workload(1, 256, 0), client_node.workload(1, 1024, 100));
        let output = eventually("pmon shows 100 %", async || {
            let output = client_node.nvidia_smi(&["pmon", "-c", "2", "-s", "um"]).success();
            let full = parse_monitor_rows(&output)
                .iter()
                .any(|row| row["pid"] == works.pid().to_string() && row["sm"] == "100");
            if full { Ok(output) } else { Err(output) }
        })
        .await;
        let rows = parse_monitor_rows(&output);
        assert_eq!(rows.len(), 6, "{output}");
        for row in &rows {
            // No process uses the first GPU.
            if row["gpu"] == "0" {
                assert_eq!(
                    [row["pid"], row["type"], row["sm"], row["fb"], row["command"]],
                    ["-"; 5],
                    "{output}"
                );
                continue;
            }
            let pid: u32 = row["pid"].parse().unwrap();
            let memory = if pid == holds.pid() { 256 } else { 1024 };
            assert!(pid == holds.pid() || pid == works.pid(), "{output}");
            assert_eq!([row["type"], row["ccpm"], row["command"]], ["C", "0", "workload"], "{output}");
            assert_eq!(row["fb"], mib(client_node.memory_with_context(memory)).to_string(), "{output}");
            // A process without a utilization sample has no value in any of these columns: always the idle one, and
            // the busy one until the driver has sampled it.
            if pid == holds.pid() || row["sm"] == "-" {
                assert_eq!([row["sm"], row["mem"], row["enc"], row["dec"]], ["-"; 4], "{output}");
            } else {
                assert_eq!([row["enc"], row["dec"]], ["0"; 2], "{output}");
            }
        }
    }
}

#[tokio::test]
async fn dmon_shows_gpu_utilization() {
    for client_node in ClientNode::one_model(A100, 2) {
        let workload = client_node.workload(1, 1024, 100);
        let output = eventually("utilization of GPU 1 is 100 %", async || {
            let output = client_node.nvidia_smi(&["dmon", "-c", "2", "-s", "pucvmet"]).success();
            let rows = parse_monitor_rows(&output);
            if rows.iter().any(|row| row["gpu"] == "1" && row["sm"] == "100") {
                Ok(output)
            } else {
                Err(output)
            }
        })
        .await;
        drop(workload);
        let card = client_node.node.card(0).unwrap();
        let rows = parse_monitor_rows(&output);
        assert_eq!(rows.iter().map(|row| row["gpu"]).collect::<Vec<_>>(), ["0", "1", "0", "1"], "{output}");
        for row in rows {
            for column in ["enc", "dec", "jpg", "ofa", "pviol", "tviol", "ccpm", "sbecc", "dbecc", "pci"] {
                assert_eq!(row[column], "0", "{column}: {output}");
            }
            assert_eq!(row["mclk"], card.clocks.memory_max.to_string(), "{output}");
            match row["gpu"] {
                "0" => {
                    let idle = [row["sm"], row["mem"], row["fb"]];
                    assert_eq!(idle, ["0"; 3], "{output}");
                    assert_eq!(row["pwr"], (card.power.idle / 1000).to_string(), "{output}");
                    assert_eq!(row["gtemp"], card.temperature.idle.to_string(), "{output}");
                    assert_eq!(row["pclk"], card.clocks.graphics_idle.to_string(), "{output}");
                }
                _ => assert!(
                    row["fb"].parse::<u64>().unwrap() >= mib(client_node.memory_with_context(1024)),
                    "{output}"
                ),
            }
        }
    }
}
