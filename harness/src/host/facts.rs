//! Facts about the host, read once at the start of a run. Values that cannot be read are `None`; lists and maps are
//! empty.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io,
    path::{Path, PathBuf},
    process::Command,
};

use model::TemplateManifest;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    cgroup,
    platform::{Probe, probe},
};
use crate::{memory, noise, scenario::Place};

/// Name of the file in the directory of a run.
pub const ENVIRONMENT_FILE: &str = "environment.json";

/// Contents of `environment.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostFacts {
    /// Platform probe of `cube-vmm`.
    pub probe: Probe,
    /// Error of opening /dev/kvm; `None` if it can be opened for reading and writing.
    pub kvm_missing: Option<String>,
    /// `model name` of the first CPU.
    pub cpu_model: Option<String>,
    /// Microcode revision in the kernel's notation.
    pub microcode: Option<String>,
    /// CPUs that this process may use.
    pub cores: usize,
    pub numa_nodes: Option<usize>,
    /// Whether this host is a virtual machine (hypervisor bit of CPUID).
    pub virtual_machine: Option<bool>,
    /// /sys/devices/system/cpu/vulnerabilities, by name.
    pub mitigations: BTreeMap<String, String>,
    /// cpufreq governor of the first CPU; `None` without cpufreq.
    pub governor: Option<String>,
    /// Selected value of transparent_hugepage/enabled.
    pub transparent_huge_pages: Option<String>,
    /// Whether KSM merges pages.
    pub ksm_runs: Option<bool>,
    /// Actions of running DAMON schemes.
    #[serde(default)]
    pub damon_actions: Vec<String>,
    pub clock_source: Option<String>,
    /// Kernel release.
    pub kernel: Option<String>,
    /// Smallest CPU quota, in cores, of the process's cgroup and its ancestors; `None` without a quota.
    pub cgroup_cpu_cores: Option<f64>,
    /// Smallest memory limit in bytes of the same cgroups; `None` without a limit.
    pub cgroup_memory_bytes: Option<u64>,
    /// Values of /proc/meminfo before the run, in bytes.
    pub meminfo: BTreeMap<String, u64>,
    /// Load average over one minute before the run.
    pub load_1min: Option<f64>,
    /// Commit of the work tree in the current directory.
    pub commit: Option<String>,
    /// Whether tracked files differ from that commit.
    pub dirty_tree: Option<bool>,
    /// SHA-256 of `cube-bench`, `cube-vmm` and, if the run starts it, `cube-api`.
    pub binaries: BTreeMap<String, String>,
    /// Build of each measured program, by name, from `build.json` in the program's directory, if that file contains
    /// the hash of the program.
    #[serde(default)]
    pub builds: BTreeMap<String, BuildFacts>,
    /// Whether `cube-bench` was built with debug assertions.
    pub debug_build: bool,
    /// URL of the API, or a description of the server that the run started; `None` for `vmm-direct`.
    #[serde(default)]
    pub endpoint: Option<String>,
    /// Software that the target reports, such as its name and version; `None` if it reports none.
    #[serde(default)]
    pub software: Option<String>,
    /// Place where the sandboxes of the run are. It decides which facts of this host matter.
    #[serde(default)]
    pub sandboxes: Place,
    /// `None` if the harness does not restore the template itself.
    pub template: Option<TemplateFacts>,
}

/// The source of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildFacts {
    /// Commit from which the program was built.
    pub commit: Option<String>,
    /// Whether tracked files differed from that commit.
    pub dirty_tree: Option<bool>,
}

/// The template of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TemplateFacts {
    /// Relative to the artifacts; absolute in older records.
    pub dir: PathBuf,
    /// Contents of `manifest.json`, but only the file name of the root image.
    pub manifest: serde_json::Value,
    /// How the template was loaded and how the page cache was prepared, as text.
    pub page_cache: String,
}

/// Reads all facts. Must not be called during measured rounds, because hashing programs takes long.
#[must_use]
pub fn read(vmm: &Path) -> HostFacts {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = |key: &str| field(&cpuinfo, key);
    let limits = cgroup::own_limits();
    HostFacts {
        probe: probe(vmm),
        kvm_missing: OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .err()
            .map(|e| e.to_string()),
        cpu_model: cpu("model name"),
        microcode: cpu("microcode"),
        cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        numa_nodes: numa_nodes(),
        virtual_machine: cpu("flags").map(|f| f.split(' ').any(|w| w == "hypervisor")),
        mitigations: mitigations(),
        governor: text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        transparent_huge_pages: text("/sys/kernel/mm/transparent_hugepage/enabled")
            .and_then(|t| chosen(&t)),
        ksm_runs: text("/sys/kernel/mm/ksm/run").map(|t| t == "1"),
        damon_actions: damon_actions(Path::new("/sys/kernel/mm/damon/admin/kdamonds")),
        clock_source: text("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        kernel: text("/proc/sys/kernel/osrelease"),
        cgroup_cpu_cores: limits.cpu_cores,
        cgroup_memory_bytes: limits.memory_bytes,
        meminfo: memory::sample(0, 0).meminfo,
        load_1min: noise::load_1min(),
        commit: git(Path::new("."), &["rev-parse", "HEAD"]),
        dirty_tree: git(
            Path::new("."),
            &["status", "--porcelain", "--untracked-files=no"],
        )
        .map(|t| !t.is_empty()),
        builds: builds(vmm),
        binaries: binaries(vmm),
        debug_build: cfg!(debug_assertions),
        endpoint: None,
        software: None,
        sandboxes: Place::default(),
        template: None,
    }
}

/// The build of this program, if it was installed with its record; otherwise `None`.
#[must_use]
pub fn own_build() -> Option<BuildFacts> {
    let program = std::env::current_exe().ok()?;
    build_of(&program, &sha256(&program).ok()?)
}

/// SHA-256 of the files of a template, as recorded in its manifest.
pub(crate) fn template_sums(manifest: &TemplateManifest) -> BTreeMap<String, String> {
    let sums = [
        ("memory", &manifest.memory_sum),
        ("state", &manifest.state_sum),
        ("layer", &manifest.layer_sum),
        ("root", &manifest.root_sum),
    ];
    sums.map(|(name, sum)| (name.to_owned(), sum.sha256.clone()))
        .into()
}

impl TemplateFacts {
    /// SHA-256 of the template's files; empty if the recorded manifest cannot be parsed.
    pub(crate) fn sums(&self) -> BTreeMap<String, String> {
        serde_json::from_value(self.manifest.clone())
            .map_or_else(|_| BTreeMap::new(), |manifest| template_sums(&manifest))
    }
}

impl HostFacts {
    /// Class of this host: runs on hosts of one class have comparable times.
    #[must_use]
    pub fn class(&self) -> String {
        let known = |text: &Option<String>| text.clone().unwrap_or_else(|| "unknown".to_owned());
        let (cpu, kernel) = (known(&self.cpu_model), known(&self.kernel));
        format!("{cpu}, {} cores, Linux {kernel}", self.cores)
    }

    /// Adds the hash of a program. A program that cannot be read is omitted.
    pub fn add_binary(&mut self, name: &str, path: &Path) {
        if let Ok(sum) = sha256(path) {
            self.builds
                .extend(build_of(path, &sum).map(|build| (name.to_owned(), build)));
            self.binaries.insert(name.to_owned(), sum);
        }
    }
}

fn text(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// The value of the first line of /proc/cpuinfo with this key, in the format `key : value`.
fn field(cpuinfo: &str, key: &str) -> Option<String> {
    cpuinfo.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then(|| value.trim().to_owned())
    })
}

/// The word in brackets of `always [madvise] never`.
fn chosen(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

/// Reads `kdamonds/N/contexts/M/schemes/K/action` of each running kdamond (admin-guide/mm/damon/usage).
fn damon_actions(kdamonds: &Path) -> Vec<String> {
    let inside = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten();
    inside(kdamonds.to_owned())
        .map(|kdamond| kdamond.path())
        .filter(|dir| fs::read_to_string(dir.join("state")).is_ok_and(|s| s.trim() == "on"))
        .flat_map(|dir| inside(dir.join("contexts")))
        .flat_map(|context| inside(context.path().join("schemes")))
        .filter_map(|scheme| fs::read_to_string(scheme.path().join("action")).ok())
        .map(|action| action.trim().to_owned())
        .collect()
}

fn numa_nodes() -> Option<usize> {
    let entries = fs::read_dir("/sys/devices/system/node").ok()?;
    let is_node = |name: &str| {
        name.strip_prefix("node")
            .is_some_and(|n| n.parse::<u32>().is_ok())
    };
    let nodes = entries
        .flatten()
        .filter(|e| is_node(&e.file_name().to_string_lossy()));
    Some(nodes.count())
}

fn mitigations() -> BTreeMap<String, String> {
    fs::read_dir("/sys/devices/system/cpu/vulnerabilities")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let value = fs::read_to_string(entry.path()).ok()?;
            Some((
                entry.file_name().to_string_lossy().into_owned(),
                value.trim().to_owned(),
            ))
        })
        .collect()
}

/// Standard output of git in a directory; `None` if git fails, for example because there is no work tree.
pub(crate) fn git(dir: &Path, args: &[&str]) -> Option<String> {
    let output = Command::new("git")
        .arg("-C")
        .arg(dir)
        .args(args)
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

fn binaries(vmm: &Path) -> BTreeMap<String, String> {
    let ours = std::env::current_exe().ok();
    [("cube-bench", ours.as_deref()), ("cube-vmm", Some(vmm))]
        .into_iter()
        .filter_map(|(name, path)| Some((name.to_owned(), sha256(path?).ok()?)))
        .collect()
}

fn builds(vmm: &Path) -> BTreeMap<String, BuildFacts> {
    let ours = std::env::current_exe().ok();
    let programs = [("cube-bench", ours.as_deref()), ("cube-vmm", Some(vmm))];
    let found = programs.into_iter().filter_map(|(name, path)| {
        let path = path?;
        Some((name.to_owned(), build_of(path, &sha256(path).ok()?)?))
    });
    found.collect()
}

/// The build that installed a program with this hash, from `build.json` next to it; `None` if the hash there
/// differs.
fn build_of(program: &Path, sum: &str) -> Option<BuildFacts> {
    #[derive(Deserialize)]
    struct Record {
        commit: Option<String>,
        dirty_tree: Option<bool>,
        programs: BTreeMap<String, String>,
    }
    let text = fs::read(program.parent()?.join("build.json")).ok()?;
    let record: Record = serde_json::from_slice(&text).ok()?;
    let is_recorded = record.programs.values().any(|recorded| recorded == sum);
    is_recorded.then_some(BuildFacts {
        commit: record.commit,
        dirty_tree: record.dirty_tree,
    })
}

/// SHA-256 of a file, 64 lower-case hex digits.
pub(crate) fn sha256(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut sum = Sha256::new();
    let mut chunk = vec![0; 1 << 20];
    loop {
        match io::Read::read(&mut file, &mut chunk)? {
            0 => break,
            n => sum.update(&chunk[..n]),
        }
    }
    Ok(model::hex(&sum.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_of_the_kernel_are_parsed() {
        assert_eq!(chosen("always [madvise] never"), Some("madvise".to_owned()));
        assert_eq!(
            field("a : 1\nmodel name\t: X Y\n", "model name"),
            Some("X Y".to_owned())
        );
    }

    #[test]
    fn the_commit_of_a_program_counts_only_with_its_hash() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("cube-vmm");
        fs::write(&program, "one").unwrap();
        let record = serde_json::json!({
            "commit": "abc", "dirty_tree": false, "programs": { "cube-vmm": sha256(&program).unwrap() },
        });
        fs::write(dir.path().join("build.json"), record.to_string()).unwrap();
        let mut facts = read(&program);
        assert_eq!(facts.builds["cube-vmm"].commit.as_deref(), Some("abc"));
        fs::write(&program, "another").unwrap();
        facts = read(&program);
        assert!(!facts.builds.contains_key("cube-vmm"));
        assert!(facts.binaries.contains_key("cube-vmm"));
    }

    #[test]
    fn facts_are_read_without_a_vmm() {
        let facts = read(Path::new("/no/such/cube-vmm"));
        assert_eq!(facts.probe.platform, None);
        assert!(facts.cores > 0 && facts.meminfo.contains_key("MemTotal"));
        assert!(!facts.binaries.contains_key("cube-vmm"));
    }
}
