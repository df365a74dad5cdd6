//! All values of a GPU that `nvidia-smi` prints: as text (`-q`), as XML (`-q -x`) and field by field (`--query-gpu`).

use crate::client_node::{ClientNode, mib};
use partage_driver_api::exports::DriverVersion;
use partage_sim_node::profile::Architecture;
use partage_testkit::sim_node::WorkloadProcess;
use std::collections::BTreeMap;

const MODELS: [&str; 6] =
    ["T4", "V100-SXM2-32GB", "A10", "A100-SXM4-40GB", "A100-SXM4-80GB", "H100-SXM5-80GB"];

/// Texts in the place of a value when the driver returned something that `nvidia-smi` does not expect.
const ERROR_WORDS: [&str; 6] = ["ERR!", "Error]", "Unknown Error", "Insufficient", "Invalid", "[GPU "];

/// One fact about a GPU, and where it appears in the text, in the XML, and among the fields. Empty means nowhere.
struct ExpectedField {
    text: &'static str,
    xml: &'static str,
    field: &'static str,
    value: String,
}

/// Returns the facts about an idle GPU.
fn expected_fields(client_node: &ClientNode, index: usize) -> Vec<ExpectedField> {
    let (gpu, card) = (&client_node.node.config().gpus[index], client_node.node.card(index).unwrap());
    let yes_or_no = |yes: bool| if yes { "Enabled" } else { "N/A" }.to_string();
    let megahertz = |clock: u32| format!("{clock} MHz");
    let watts = |milliwatts: u32| format!("{:.2} W", f64::from(milliwatts) / 1000.0);
    let mebibytes = |bytes: u64| format!("{} MiB", mib(bytes));
    let architecture = match card.architecture {
        Architecture::Volta => "Volta",
        Architecture::Turing => "Turing",
        Architecture::Ampere => "Ampere",
        Architecture::Ada => "Ada Lovelace",
        Architecture::Hopper => "Hopper",
    };
    let mig = if card.mig_instances > 0 { "Disabled" } else { "N/A" };
    // A card that is on no board of several reports that it is the first module.
    let module = gpu.module.max(1).to_string();
    let (clocks, power, celsius) = (&card.clocks, &card.power, &card.temperature);
    let (capability, generation) = (card.compute.capability, card.pci.generation.to_string());
    let draw = match client_node.driver() {
        DriverVersion::R535 => ("GPU Power Readings/Power Draw", "gpu_power_readings/power_draw"),
        DriverVersion::R550 => {
            ("GPU Power Readings/Average Power Draw", "gpu_power_readings/average_power_draw")
        }
    };
    #[rustfmt::skip]
    let facts = [
        ("Product Name", "product_name", "name", card.name.to_string()),
        ("Product Architecture", "product_architecture", "", architecture.to_string()),
        ("Serial Number", "serial", "serial", gpu.serial.clone()),
        ("GPU UUID", "uuid", "uuid", gpu.uuid.clone()),
        ("Minor Number", "minor_number", "", gpu.minor.to_string()),
        ("VBIOS Version", "vbios_version", "vbios_version", card.board.vbios.to_string()),
        ("Board ID", "board_id", "", format!("{:#x}", gpu.board_id())),
        ("Board Part Number", "board_part_number", "", card.board.part.to_string()),
        ("GPU Part Number", "gpu_part_number", "", card.board.chip.to_string()),
        ("Module ID", "gpu_module_id", "", module),
        ("Inforom Version/Image Version", "inforom_version/img_version", "inforom.img", card.board.inforom.to_string()),
        ("Inforom Version/ECC Object", "inforom_version/ecc_object", "inforom.ecc", card.board.inforom_ecc.to_string()),
        ("PCI/Bus Id", "pci/pci_bus_id", "pci.bus_id", gpu.pci.to_string()),
        ("PCI/Device Id", "", "pci.device_id", format!("{:#010X}", card.pci.device).replace("0X", "0x")),
        ("", "pci/pci_device_id", "", format!("{:08X}", card.pci.device)),
        ("PCI/Sub System Id", "", "pci.sub_device_id", format!("{:#010X}", card.pci.subsystem).replace("0X", "0x")),
        ("PCI/GPU Link Info/PCIe Generation/Max", "pci/pci_gpu_link_info/pcie_gen/max_link_gen", "pcie.link.gen.max", generation.clone()),
        ("PCI/GPU Link Info/PCIe Generation/Current", "pci/pci_gpu_link_info/pcie_gen/current_link_gen", "pcie.link.gen.current", card.pci.generation_idle.to_string()),
        ("PCI/GPU Link Info/Link Width/Max", "pci/pci_gpu_link_info/link_widths/max_link_width", "", format!("{}x", card.pci.width)),
        ("", "", "pcie.link.width.current", card.pci.width.to_string()),
        ("Performance State", "performance_state", "pstate", format!("P{}", card.idle_state)),
        ("Clocks Event Reasons/Idle", "clocks_event_reasons/clocks_event_reason_gpu_idle", "clocks_event_reasons.gpu_idle", "Active".to_string()),
        ("Persistence Mode", "persistence_mode", "persistence_mode", "Disabled".to_string()),
        ("Compute Mode", "compute_mode", "compute_mode", "Default".to_string()),
        ("MIG Mode/Current", "mig_mode/current_mig", "mig.mode.current", mig.to_string()),
        ("FB Memory Usage/Total", "fb_memory_usage/total", "memory.total", mebibytes(card.memory.total)),
        ("FB Memory Usage/Used", "fb_memory_usage/used", "memory.used", mebibytes(0)),
        ("BAR1 Memory Usage/Total", "bar1_memory_usage/total", "", mebibytes(card.memory.bar1)),
        ("Utilization/Gpu", "utilization/gpu_util", "utilization.gpu", "0 %".to_string()),
        ("Utilization/Memory", "utilization/memory_util", "utilization.memory", "0 %".to_string()),
        ("ECC Mode/Current", "ecc_mode/current_ecc", "ecc.mode.current", yes_or_no(card.memory.ecc)),
        ("Temperature/GPU Current Temp", "temperature/gpu_temp", "", format!("{} C", celsius.idle)),
        ("", "", "temperature.gpu", celsius.idle.to_string()),
        (draw.0, draw.1, "power.draw", watts(power.idle)),
        ("GPU Power Readings/Current Power Limit", "gpu_power_readings/current_power_limit", "power.limit", watts(power.default_limit)),
        ("GPU Power Readings/Default Power Limit", "gpu_power_readings/default_power_limit", "power.default_limit", watts(power.default_limit)),
        ("GPU Power Readings/Min Power Limit", "gpu_power_readings/min_power_limit", "power.min_limit", watts(power.min_limit)),
        ("GPU Power Readings/Max Power Limit", "gpu_power_readings/max_power_limit", "power.max_limit", watts(power.max_limit)),
        ("", "", "enforced.power.limit", watts(power.default_limit)),
        ("Clocks/Graphics", "clocks/graphics_clock", "clocks.current.graphics", megahertz(clocks.graphics_idle)),
        ("Clocks/SM", "clocks/sm_clock", "clocks.current.sm", megahertz(clocks.graphics_idle)),
        ("Clocks/Memory", "clocks/mem_clock", "clocks.current.memory", megahertz(clocks.memory_idle)),
        ("Clocks/Video", "clocks/video_clock", "clocks.current.video", megahertz(clocks.video_idle)),
        ("Applications Clocks/Graphics", "applications_clocks/graphics_clock", "clocks.applications.graphics", megahertz(clocks.graphics_default)),
        ("Max Clocks/Graphics", "max_clocks/graphics_clock", "clocks.max.graphics", megahertz(clocks.graphics_max)),
        ("Max Clocks/Memory", "max_clocks/mem_clock", "clocks.max.memory", megahertz(clocks.memory_max)),
        ("Max Clocks/Video", "max_clocks/video_clock", "", megahertz(clocks.video_max)),
        ("", "", "index", index.to_string()),
        ("", "", "count", client_node.node.config().gpus.len().to_string()),
        ("", "", "compute_cap", format!("{}.{}", capability / 10, capability % 10)),
        ("", "", "driver_version", client_node.driver().version().to_string()),
    ];
    let fact = |(text, xml, field, value)| ExpectedField { text, xml, field, value };
    facts.into_iter().map(fact).collect()
}

/// Parses the text of `-q` into a map from paths of indented titles to values; the paths of a GPU start with `GPU
/// 00000000:07:00.0`.
fn parse_query_text(text: &str) -> BTreeMap<String, String> {
    let mut titles: Vec<(usize, &str)> = Vec::new();
    let mut found = BTreeMap::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let depth = line.len() - line.trim_start().len();
        titles.retain(|(other, _)| *other < depth);
        let (title, value) = match line.split_once(" : ") {
            Some((title, value)) => (title.trim(), Some(value.trim())),
            None => (line.trim(), None),
        };
        titles.push((depth, title));
        let path: Vec<&str> = titles.iter().map(|(_, title)| *title).collect();
        if let Some(value) = value {
            found.insert(path.join("/"), value.to_string());
        }
    }
    found
}

fn assert_no_error_words(output: &str) {
    let line = output.lines().find(|line| ERROR_WORDS.iter().any(|expected| line.contains(expected)));
    assert_eq!(line, None, "{output}");
}

#[test]
fn query_text_matches_the_node_config() {
    for client_node in ClientNode::on_node_and_in_container(&MODELS, 2) {
        let model = client_node.model();
        let output = client_node.nvidia_smi(&["-q"]).success();
        assert_no_error_words(&output);
        let found = parse_query_text(&output);
        let cuda = client_node.driver().cuda();
        assert_eq!(found["Driver Version"], client_node.driver().version());
        assert_eq!(found["CUDA Version"], format!("{}.{}", cuda / 1000, cuda % 1000 / 10));
        assert_eq!(found["Attached GPUs"], "2");
        for (index, gpu) in client_node.node.config().gpus.iter().enumerate() {
            for fact in expected_fields(&client_node, index).iter().filter(|fact| !fact.text.is_empty()) {
                let path = format!("GPU {}/{}", gpu.pci, fact.text);
                assert_eq!(found.get(&path), Some(&fact.value), "{model}: {path}\n{output}");
            }
            assert_eq!(found[&format!("GPU {}/Processes", gpu.pci)], "None");
        }
    }
}

#[test]
fn query_text_shows_processes_and_faults() {
    for client_node in ClientNode::one_model("A100-SXM4-40GB", 2) {
        let workload = client_node.workload(1, 1536, 0);
        client_node.node.state().inject(1, partage_sim_node::state::GpuFault::UncorrectedErrors(3));
        let output = client_node.nvidia_smi(&["-q", "-i", "1"]).success();
        assert_no_error_words(&output);
        let found = parse_query_text(&output);
        let is = |path: &str, value: &str| {
            let path = format!("GPU {}/{path}", client_node.node.config().gpus[1].pci);
            assert_eq!(found.get(&path).map(String::as_str), Some(value), "{path}\n{output}");
        };
        let held = format!("{} MiB", mib(client_node.memory_with_context(1536)));
        is("Processes/Process ID", &workload.pid().to_string());
        is("Processes/Process ID/Type", "C");
        is("Processes/Process ID/Name", WorkloadProcess::PROCESS_NAME);
        is("Processes/Process ID/Used GPU Memory", &held);
        is("FB Memory Usage/Used", &held);
        is("ECC Errors/Volatile/DRAM Uncorrectable", "3");
        is("ECC Errors/Aggregate/DRAM Uncorrectable", "3");
        is("ECC Errors/Volatile/DRAM Correctable", "0");
        is("Clocks Event Reasons/Idle", "Not Active");
        is("Clocks/Graphics", "1095 MHz");
    }
}

#[test]
fn query_xml_is_well_formed_and_matches_the_node_config() {
    for client_node in
        ClientNode::on_node_and_in_container(&["T4", "V100-SXM2-32GB", "A100-SXM4-40GB", "H100-SXM5-80GB"], 2)
    {
        let model = client_node.model();
        let document =
            client_node.script("flat_xml.py", &[client_node.nvidia_smi_program().to_str().unwrap()]);
        assert_no_error_words(&serde_json::to_string_pretty(&document).unwrap());
        assert_eq!(document["node"]["driver_version"], client_node.driver().version());
        assert_eq!(document["node"]["attached_gpus"], "2");
        for (index, gpu) in client_node.node.config().gpus.iter().enumerate() {
            let found = &document["gpus"][index];
            assert_eq!(found["id"], gpu.pci.to_string());
            for fact in expected_fields(&client_node, index).iter().filter(|fact| !fact.xml.is_empty()) {
                assert_eq!(found[fact.xml][0], fact.value, "{model}: {}\n{found:#}", fact.xml);
            }
            let card = client_node.node.card(index).unwrap();
            let clocks =
                found["supported_clocks/supported_mem_clock/supported_graphics_clock"].as_array().unwrap();
            assert_eq!(clocks[0], format!("{} MHz", card.clocks.graphics_max), "the fastest clock is first");
        }
    }
}

#[test]
fn query_xml_shows_processes() {
    for client_node in ClientNode::one_model("T4", 1) {
        let workloads = [64, 128].map(|mib| (mib, client_node.workload(0, mib, 0)));
        let document =
            client_node.script("flat_xml.py", &[client_node.nvidia_smi_program().to_str().unwrap()]);
        let found = &document["gpus"][0];
        for (place, (memory, workload)) in workloads.iter().enumerate() {
            let process = |field: &str| found[format!("processes/process_info/{field}")][place].clone();
            assert_eq!(process("pid"), workload.pid().to_string(), "{found:#}");
            assert_eq!(process("type"), "C");
            assert_eq!(process("process_name"), WorkloadProcess::PROCESS_NAME);
            assert_eq!(
                process("used_memory"),
                format!("{} MiB", mib(client_node.memory_with_context(*memory)))
            );
        }
        let used = client_node.memory_with_context(64) + client_node.memory_with_context(128);
        assert_eq!(found["fb_memory_usage/used"][0], format!("{} MiB", mib(used)));
    }
}

/// Returns the fields that `nvidia-smi` lists in its help.
fn known_fields(client_node: &ClientNode) -> Vec<String> {
    let help = client_node.nvidia_smi(&["--help-query-gpu"]).success();
    let quoted = help.lines().filter_map(|line| line.strip_prefix('"')?.split_once('"'));
    // A description may start with a quotation mark too.
    let is_name = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '.' || c == '_');
    quoted.map(|(name, _)| name.to_string()).filter(|name| is_name(name)).collect()
}

#[test]
fn every_query_field_has_a_value() {
    for client_node in ClientNode::on_node_and_in_container(&MODELS, 2) {
        let model = client_node.model();
        let fields = known_fields(&client_node);
        assert_eq!(fields.len(), if client_node.driver() == DriverVersion::R535 { 141 } else { 144 });
        let output =
            client_node.nvidia_smi(&[&format!("--query-gpu={}", fields.join(",")), "--format=csv"]).success();
        assert_no_error_words(&output);
        let mut lines = output.lines();
        let header: Vec<&str> = lines.next().unwrap().split(", ").collect();
        assert_eq!(header.len(), fields.len());
        for index in 0..2 {
            let values = lines.next().unwrap().split(", ").map(str::to_string);
            let found: BTreeMap<&String, String> = fields.iter().zip(values).collect();
            assert_eq!(found.len(), fields.len(), "{output}");
            for fact in expected_fields(&client_node, index).iter().filter(|fact| !fact.field.is_empty()) {
                let value = if fact.value == "N/A" { "[N/A]" } else { &fact.value };
                let shown = found.get(&fact.field.to_string()).map(String::as_str);
                assert_eq!(shown, Some(value), "{model}: {}\n{found:#?}", fact.field);
            }
        }
        assert_eq!(lines.next(), None);
    }
}
