//! The host: CPU, kernel, devices, cgroups, memory, disk.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use serde::Deserialize;

use super::Finding;

/// The first kernel with tcx links, on which network isolation is built.
const TCX: (u32, u32) = (6, 6);
/// Names of the controllers in version 2 of cgroups, and of their hierarchies in version 1.
const CONTROLLERS: [(&str, &str); 4] = [
    ("memory", "memory"),
    ("cpu", "cpu"),
    ("pids", "pids"),
    ("io", "blkio"),
];
/// Capabilities that the server uses: bits in `CapEff`, and names.
const CAPABILITIES: [(u32, &str); 6] = [
    (6, "CAP_SETGID"),
    (7, "CAP_SETUID"),
    (12, "CAP_NET_ADMIN"),
    (21, "CAP_SYS_ADMIN"),
    (38, "CAP_PERFMON"),
    (39, "CAP_BPF"),
];
/// Memory for the server's reserve and one sandbox of the template `base`.
const LEAST_MEMORY: u64 = 1 << 30;
/// Disk space for the server's reserve, the template and some sandboxes.
const LEAST_DISK: u64 = 3 << 30;

pub(super) fn findings(state: &Path) -> Vec<Finding> {
    let read = |path: &str| fs::read_to_string(path);
    let mounts = read("/proc/mounts").unwrap_or_default();
    vec![
        kvm(),
        vmm(),
        kernel(&read("/proc/sys/kernel/osrelease").unwrap_or_default()),
        capabilities(&read("/proc/self/status").unwrap_or_default()),
        tun(),
        bpffs(),
        cgroups(Path::new("/sys/fs/cgroup"), &mounts),
        egress(&mounts),
        seccomp(),
        landlock(read("/sys/kernel/security/lsm")),
        memory(&read("/proc/meminfo").unwrap_or_default()),
        disk(state),
    ]
    .into_iter()
    .chain(etcd(state))
    .collect()
}

/// Checks how the node of a cluster reaches etcd. `None`: this host is not a node, or the settings are not
/// readable.
fn etcd(state: &Path) -> Option<Finding> {
    let settings = fs::read(state.join("cluster/cluster.json")).ok()?;
    let settings: ClusterSettings = serde_json::from_slice(&settings).ok()?;
    let plain = settings.etcd.iter().find(|url| url.starts_with("http://"));
    Some(match plain {
        None => Finding::ok("etcd", "reached over TLS"),
        Some(url) => Finding::warning(
            "etcd",
            format!(
                "{url} is plain HTTP: every program of this host can change the cluster's records"
            ),
            "found the cluster with an https URL (`cube cluster init --etcd https://…`)",
        ),
    })
}

/// The used part of a node's settings.
#[derive(Deserialize)]
struct ClusterSettings {
    etcd: Vec<String>,
}

fn kvm() -> Finding {
    let kvm = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm");
    match kvm {
        Ok(_) => Finding::ok("kvm", "/dev/kvm can be opened"),
        Err(why) if why.kind() == io::ErrorKind::NotFound => Finding::missing(
            "kvm",
            "/dev/kvm does not exist",
            "enable virtualization in the firmware (in a virtual machine: nested virtualization) and run \
             `modprobe kvm_intel` or `modprobe kvm_amd`; in a container, pass the device: --device /dev/kvm",
        ),
        Err(why) => Finding::missing(
            "kvm",
            format!("/dev/kvm cannot be opened: {why}"),
            "run as root; in a container, allow the device",
        ),
    }
}

/// Output of `cube-vmm probe`.
#[derive(Deserialize)]
struct Probe {
    platform: Option<String>,
    #[serde(default)]
    why: String,
}

fn vmm() -> Finding {
    let program = beside("cube-vmm");
    let shown = program.display();
    let output = Command::new("timeout")
        .arg("10")
        .arg(&program)
        .arg("probe")
        .output();
    let probe = output.map(|done| serde_json::from_slice::<Probe>(&done.stdout));
    match probe {
        Ok(Ok(Probe {
            platform: Some(name),
            ..
        })) => Finding::ok("cpu", format!("guests run on the platform {name}")),
        Ok(Ok(Probe { why, .. })) => Finding::missing(
            "cpu",
            format!("no guest runs here: {why}"),
            "use a host whose KVM has VMX, SVM, or guests without them",
        ),
        Ok(Err(_)) | Err(_) => Finding::missing(
            "cpu",
            format!("{shown} does not run"),
            "install the package again, or run this command from where it is installed",
        ),
    }
}

/// A program of the installation.
pub(crate) fn beside(name: &str) -> PathBuf {
    let program = std::env::current_exe().ok();
    let dir = program.as_deref().and_then(Path::parent);
    dir.unwrap_or(Path::new("/usr/lib/cube/bin")).join(name)
}

fn kernel(release: &str) -> Finding {
    let release = release.trim();
    let mut numbers = release.split(['.', '-']).map(|n| n.parse().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= TCX {
        return Finding::ok("kernel", format!("Linux {release}"));
    }
    let (major, minor) = TCX;
    Finding::missing(
        "kernel",
        format!("Linux {release} cannot isolate the networks of sandboxes"),
        format!(
            "boot Linux {major}.{minor} or newer (Debian 12: linux-image-amd64 of bookworm-backports), or give sandboxes no \
             network: `mode = \"none\"` below [network] in /etc/cube/cube.toml"
        ),
    )
}

fn capabilities(status: &str) -> Finding {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let held = line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    let held = held.unwrap_or(0);
    let lacking = CAPABILITIES.iter().filter(|(bit, _)| held >> bit & 1 == 0);
    let lacking: Vec<_> = lacking.map(|(_, name)| *name).collect();
    if lacking.is_empty() {
        return Finding::ok("permissions", "all capabilities of a server");
    }
    Finding::missing(
        "permissions",
        format!("without {}", lacking.join(", ")),
        "run as root; in a container, with these capabilities",
    )
}

fn tun() -> Finding {
    if Path::new("/dev/net/tun").exists() {
        Finding::ok("tun", "/dev/net/tun exists")
    } else {
        let cure = "run `modprobe tun`; in a container, pass the device: --device /dev/net/tun";
        Finding::missing("tun", "/dev/net/tun does not exist", cure)
    }
}

fn bpffs() -> Finding {
    let dir = "/sys/fs/bpf";
    match statfs(dir) {
        Ok(found) if found.filesystem_type() == BPF_FS_MAGIC => {
            Finding::ok("ebpf", format!("{dir} keeps programs over restarts"))
        }
        Ok(_) => Finding::missing(
            "ebpf",
            format!("no bpffs is mounted on {dir}"),
            format!("mount -t bpf bpf {dir}; add it to /etc/fstab"),
        ),
        Err(why) => Finding::missing(
            "ebpf",
            format!("{dir}: {why}"),
            "boot a kernel with CONFIG_BPF_SYSCALL",
        ),
    }
}

fn cgroups(root: &Path, mounts: &str) -> Finding {
    let offered = [
        root.join("cgroup.controllers"),
        root.join("unified/cgroup.controllers"),
    ];
    let offered = offered.map(|file| fs::read_to_string(file).unwrap_or_default());
    let is_offered = |name: &str| {
        offered
            .iter()
            .any(|list| list.split_whitespace().any(|w| w == name))
    };
    let is_mounted = |name: &str| root.join(name).join("cgroup.procs").exists();
    let lacking = CONTROLLERS
        .iter()
        .filter(|(v2, v1)| !is_offered(v2) && !is_mounted(v1));
    let lacking: Vec<_> = lacking.map(|(name, _)| *name).collect();
    if lacking.is_empty() {
        let limits = "limits of memory, CPU, processes and disk bandwidth";
        // In version 1, a VMM joins its groups without this wait (`pool::cgroup`).
        let is_used = CONTROLLERS.iter().any(|(v2, _)| is_offered(v2));
        let hint = slow_mount(mounts).filter(|_| is_used).map(|at| {
            format!(
                "; resumes, forks and starts without a warm slot wait 8 ms for the kernel: \
                 `mount -o remount,favordynmods {at}` removes that wait until the next boot"
            )
        });
        return Finding::ok("cgroups", format!("{limits}{}", hint.unwrap_or_default()));
    }
    Finding::missing(
        "cgroups",
        format!("no controllers for {}", lacking.join(", ")),
        "boot without cgroup_disable=; in a container, delegate the controllers; or run sandboxes without these limits: \
         `allow_missing_limits = true` below [sandbox] in /etc/cube/cube.toml",
    )
}

/// Whether the server finds cgroups of version 2 (`netisolation::datapath::proxy_group`).
fn egress(mounts: &str) -> Finding {
    let mut mounts = mounts.lines().map(|line| line.split(' '));
    let is_found = mounts.any(|mut fields| {
        matches!(
            fields.nth(1),
            Some("/sys/fs/cgroup" | "/sys/fs/cgroup/unified")
        ) && fields.next() == Some("cgroup2")
    });
    if is_found {
        return Finding::ok("egress", "the kernel limits where cube-egress connects");
    }
    Finding::warning(
        "egress",
        "without cgroups of version 2, only cube-egress itself limits where it connects",
        "mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified; then restart the server",
    )
}

/// Mount point of cgroups of version 2 if moving a process into one waits for an RCU grace period.
fn slow_mount(mounts: &str) -> Option<&str> {
    let mut mounts = mounts
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>());
    mounts.find_map(|fields| match fields[..] {
        [_, at, "cgroup2", options, ..] if !options.contains("favordynmods") => Some(at),
        _ => None,
    })
}

fn seccomp() -> Finding {
    if Path::new("/proc/sys/kernel/seccomp").is_dir() {
        Finding::ok("seccomp", "available")
    } else {
        let cure = "boot a kernel with CONFIG_SECCOMP_FILTER: a VM does not run unconfined";
        Finding::missing("seccomp", "not available", cure)
    }
}

fn landlock(list: io::Result<String>) -> Finding {
    match list {
        Ok(list) if list.trim().split(',').any(|name| name == "landlock") => {
            Finding::ok("landlock", "available")
        }
        Ok(list) => Finding::warning(
            "landlock",
            format!("not among the security modules ({})", list.trim()),
            "boot with lsm=landlock,… in front of the others; one layer of the VMs' confinement is missing",
        ),
        // Containers often have no securityfs. The VMM logs missing layers.
        Err(_) => Finding::warning(
            "landlock",
            "unknown: /sys/kernel/security is not mounted",
            "mount -t securityfs securityfs /sys/kernel/security",
        ),
    }
}

fn memory(meminfo: &str) -> Finding {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|text| text.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    let Some(bytes) = kib.map(|kib| kib << 10) else {
        return Finding::warning("memory", "unknown", "mount /proc");
    };
    let found = format!("{} MiB available", bytes >> 20);
    if bytes >= LEAST_MEMORY {
        Finding::ok("memory", found)
    } else {
        let cure = format!(
            "a first sandbox needs {} MiB: end other programs",
            LEAST_MEMORY >> 20
        );
        Finding::missing("memory", found, cure)
    }
}

fn disk(state: &Path) -> Finding {
    let existing = state.ancestors().find(|dir| dir.exists()).unwrap_or(state);
    let at = existing.display();
    let free = match nix::sys::statvfs::statvfs(existing) {
        Ok(stat) => stat.blocks_available().saturating_mul(stat.fragment_size()),
        Err(why) => return Finding::missing("disk", format!("{at}: {why}"), "check the disk"),
    };
    let found = format!("{} MiB free at {at}", free >> 20);
    if free >= LEAST_DISK {
        return Finding::ok("disk", found);
    }
    let cure = format!(
        "a server with its reserve needs {} MiB: free some, or set `state` below [server] to a larger disk in /etc/cube/cube.toml",
        LEAST_DISK >> 20
    );
    Finding::missing("disk", found, cure)
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn an_old_kernel_is_named_with_its_cure() {
        assert_eq!(kernel("6.12.9-amd64\n").verdict, Verdict::Ok);
        assert_eq!(kernel("6.6").verdict, Verdict::Ok);
        for old in ["6.1.0-56-amd64", "5.10", ""] {
            let found = kernel(old);
            assert_eq!(found.verdict, Verdict::Missing, "{old}");
            assert!(found.cure.unwrap().contains("bookworm-backports"));
        }
    }

    #[test]
    fn plain_http_to_etcd_is_a_warning() {
        let state = tempfile::tempdir().unwrap();
        assert_eq!(etcd(state.path()), None);
        fs::create_dir(state.path().join("cluster")).unwrap();
        for (url, expected) in [
            ("https://10.0.0.1:2379", Verdict::Ok),
            ("http://127.0.0.1:2379", Verdict::Warning),
        ] {
            let settings = format!("{{\"format\": 2, \"etcd\": [\"{url}\"]}}");
            fs::write(state.path().join("cluster/cluster.json"), settings).unwrap();
            assert_eq!(etcd(state.path()).unwrap().verdict, expected, "{url}");
        }
    }

    #[test]
    fn lacking_capabilities_are_named() {
        let status = |hex: &str| capabilities(&format!("Name:\tx\nCapEff:\t{hex}\n"));
        assert_eq!(status("000001ffffffffff").verdict, Verdict::Ok);
        let found = status("000000ffffffffff").found + &status("0000003fffffffff").found;
        assert!(found.contains("CAP_BPF"), "{found}");
        assert!(status("0000000000000000").found.contains("CAP_SYS_ADMIN"));
        assert_eq!(capabilities("").verdict, Verdict::Missing);
    }

    #[test]
    fn each_controller_may_be_in_either_version() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let cgroups = |root| {
            cgroups(
                root,
                "tmpfs /a tmpfs rw 0 0\ncgroup2 /a/b cgroup2 rw,nosuid 0 0",
            )
        };
        assert!(cgroups(root).found.contains("memory, cpu, pids, io"));
        fs::write(root.join("cgroup.controllers"), "cpuset cpu memory\n").unwrap();
        for name in ["pids", "blkio"] {
            assert_eq!(cgroups(root).verdict, Verdict::Missing);
            fs::create_dir(root.join(name)).unwrap();
            fs::write(root.join(name).join("cgroup.procs"), "").unwrap();
        }
        assert_eq!(cgroups(root).verdict, Verdict::Ok);
        assert!(cgroups(root).found.contains("favordynmods /a/b"));
        let fast = super::cgroups(root, "cgroup2 /a/b cgroup2 rw,favordynmods 0 0");
        assert!(!fast.found.contains("favordynmods"));
        fs::write(root.join("cgroup.controllers"), "cpuset\n").unwrap();
        for name in ["memory", "cpu"] {
            fs::create_dir(root.join(name)).unwrap();
            fs::write(root.join(name).join("cgroup.procs"), "").unwrap();
        }
        assert!(!cgroups(root).found.contains("favordynmods"));
    }

    #[test]
    fn absent_cgroups_of_version_2_are_a_warning() {
        for (mounts, verdict) in [
            ("x /sys/fs/cgroup/unified cgroup2 rw 0 0", Verdict::Ok),
            (
                "a / ext4 rw 0 0\nx /sys/fs/cgroup cgroup2 rw 0 0",
                Verdict::Ok,
            ),
            ("x /mnt cgroup2 rw 0 0", Verdict::Warning),
            ("x /sys/fs/cgroup tmpfs rw 0 0", Verdict::Warning),
        ] {
            assert_eq!(egress(mounts).verdict, verdict, "{mounts}");
        }
    }

    #[test]
    fn too_little_memory_and_absent_landlock_are_found() {
        assert_eq!(
            memory("MemTotal: 9 kB\nMemAvailable:  2097152 kB\n").verdict,
            Verdict::Ok
        );
        assert_eq!(
            memory("MemAvailable: 524288 kB\n").verdict,
            Verdict::Missing
        );
        assert_eq!(memory("").verdict, Verdict::Warning);
        assert_eq!(
            landlock(Ok("capability,landlock,yama\n".into())).verdict,
            Verdict::Ok
        );
        assert_eq!(
            landlock(Ok("capability,yama".into())).verdict,
            Verdict::Warning
        );
    }
}
