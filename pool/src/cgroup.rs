//! Control groups (cgroups): one around the pool, and one inside it for each VM. A controller is used in version 2 if
//! the host offers it there, otherwise in version 1, where each controller has a separate hierarchy. If a controller is
//! missing or the kernel rejects the limit of a VM, of the pool or of the server, this is an error, or a warning if
//! [`MissingLimits`] allows it.
//!
//! ```text
//! <mount>/cube-<tag>/            memory of all VMs; the tag identifies the state directory
//!                   <sandbox>/   memory, CPU, processes, disk bandwidth of one VM
//!         cube-<tag>-server-<pid>/             memory of the server, if that is limited
//!         cube-<tag>-server-<pid>-background/  CPU of the server's programs that sandboxes precede
//! ```
//! A VM's group is created before its VMM starts, contains only the VMM process, and is removed after that process has
//! exited. In version 1, a VM has no group for disk bandwidth unless disk bandwidth is limited.

mod background;
mod server;

pub(crate) use server::FormerServers;

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use model::SandboxId;

use crate::{
    config::{MissingLimits, SandboxLimits},
    sandbox::Priority,
};

const ROOT: &str = "/sys/fs/cgroup";
const CONTROLLERS: [Controller; 4] = [
    Controller::Memory,
    Controller::Cpu,
    Controller::Pids,
    Controller::Io,
];
/// Length of a CPU period in microseconds, the kernel's default.
const PERIOD_US: u64 = 100_000;
/// The kernel's default weight of a group in version 2, and the equivalent shares in version 1.
const WEIGHT: u64 = 100;
const SHARES: u64 = 1024;
/// Name of a group that is created and removed when the pool opens, to check that the kernel accepts every limit.
const PROBE: &str = "probe";

/// Name of the group of the VM that rebuilds a template. There is one at a time.
pub(crate) const REBUILD: &str = "rebuild";
/// The CPU weight of background work: a tenth of a sandbox's default, so that a busy host delays the work but does not
/// stop it.
const BACKGROUND_WEIGHT: u16 = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Controller {
    Memory,
    Cpu,
    Pids,
    Io,
}

impl Controller {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
            Self::Pids => "pids",
            Self::Io => "io",
        }
    }

    /// Name of the directory below [`ROOT`] where version 1 hierarchies are usually mounted.
    fn v1_mount(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
            Self::Pids => "pids",
            Self::Io => "blkio",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Version {
    fn memory_limit(self) -> &'static str {
        match self {
            Self::One => "memory.limit_in_bytes",
            Self::Two => "memory.max",
        }
    }
}

#[derive(Clone, Debug)]
struct Hierarchy {
    version: Version,
    /// The pool's group.
    group: PathBuf,
    controllers: Vec<Controller>,
}

#[derive(Clone, Debug)]
pub(crate) struct Groups {
    hierarchies: Vec<Hierarchy>,
    limits: SandboxLimits,
    missing: MissingLimits,
    /// `major:minor` of the disk that layers are on; `None` if their file system has no block device.
    disk: Option<String>,
}

impl Groups {
    /// Finds the hierarchies and creates the pool's group, in which all VMs together may use `memory` bytes.
    ///
    /// # Errors
    /// Returns an error if a limit of VMs or of the pool cannot be enforced and [`MissingLimits::Refuse`] is set, or if
    /// the probe group cannot be created or removed.
    pub(crate) fn open(
        tag: &str,
        limits: SandboxLimits,
        missing: MissingLimits,
        memory: Option<u64>,
        scratch: &Path,
    ) -> io::Result<Self> {
        let hierarchies = find(Path::new(ROOT), &format!("cube-{tag}"));
        let this = Self {
            hierarchies,
            limits,
            missing,
            disk: disk_of(scratch),
        };
        this.check_controllers()?;
        if let Some(bytes) = memory {
            this.limit_pool(bytes)?;
        }
        this.make_group(PROBE, 1 << 30)?;
        this.remove(PROBE)?;
        Ok(this)
    }

    /// Sets the limit of the memory of all VMs together.
    fn limit_pool(&self, bytes: u64) -> io::Result<()> {
        let bytes = bytes.max(LEAST_MEMORY).to_string();
        for h in &self.hierarchies {
            if h.controllers.contains(&Controller::Memory) {
                let file = h.group.join(h.version.memory_limit());
                self.held(&file, fs::write(&file, &bytes))?;
            }
        }
        Ok(())
    }

    fn check_controllers(&self) -> io::Result<()> {
        let has = |c: &Controller| self.hierarchies.iter().any(|h| h.controllers.contains(c));
        let missing: Vec<_> = CONTROLLERS.iter().filter(|c| !has(c)).collect();
        let names: Vec<_> = missing.iter().map(|c| c.name()).collect();
        match (names.as_slice(), self.missing) {
            ([], _) => Ok(()),
            (_, MissingLimits::Refuse) => Err(io::Error::other(format!(
                "the host has no cgroup controllers for {}: mount or delegate these controllers, or allow sandboxes \
                 without such limits with sandbox.allow_missing_limits",
                names.join(", ")
            ))),
            (_, MissingLimits::Allow) => {
                let names = names.join(", ");
                tracing::warn!(
                    names,
                    "the host lacks these cgroup controllers: their limits are not enforced"
                );
                Ok(())
            }
        }
    }

    /// Creates the group of a VM with `ram` bytes of guest memory.
    ///
    /// # Errors
    /// Returns an error if the group cannot be created, or if the kernel rejects a limit and [`MissingLimits::Refuse`]
    /// is set.
    pub(crate) fn create(&self, id: &SandboxId, ram: u64, priority: Priority) -> io::Result<()> {
        match priority {
            Priority::Normal => self.make_group(id.as_str(), ram),
            Priority::Background => self.in_background().make_group(id.as_str(), ram),
        }
    }

    /// Raises the CPU weight of a VM's group, which was created for the background, to the weight of a sandbox.
    ///
    /// # Errors
    /// Returns an error if the kernel rejects the weight and [`MissingLimits::Refuse`] is set.
    pub(crate) fn to_foreground(&self, id: &SandboxId) -> io::Result<()> {
        let has_cpu = |h: &&Hierarchy| h.controllers.contains(&Controller::Cpu);
        for h in self.needed().filter(has_cpu) {
            for (file, value) in self.cpu_settings(h.version) {
                let file = h.group.join(id.as_str()).join(file);
                self.held(&file, fs::write(&file, value))?;
            }
        }
        Ok(())
    }

    /// Creates the group of the VM that rebuilds a template. Under contention it gets little CPU time.
    ///
    /// # Errors
    /// Returns the errors of [`Groups::create`].
    pub(crate) fn create_for_rebuild(&self, ram: u64) -> io::Result<()> {
        self.in_background().make_group(REBUILD, ram)
    }

    fn in_background(&self) -> Self {
        let limits = SandboxLimits {
            cpu_weight: BACKGROUND_WEIGHT.min(self.limits.cpu_weight),
            ..self.limits.clone()
        };
        Self {
            limits,
            ..self.clone()
        }
    }

    fn make_group(&self, name: &str, ram: u64) -> io::Result<()> {
        for h in self.needed() {
            let group = h.group.join(name);
            match fs::create_dir(&group) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
                _ => {}
            }
            for controller in &h.controllers {
                for (file, value) in self.settings(h.version, *controller, ram) {
                    let (file, value) = possible(&group, file, value);
                    self.held(&group.join(file), fs::write(group.join(file), value))?;
                }
            }
        }
        Ok(())
    }

    /// Handles the result of setting a limit: a failure is an error or a warning, as [`MissingLimits`] requires.
    fn held(&self, file: &Path, written: io::Result<()>) -> io::Result<()> {
        match (written, self.missing) {
            (Err(e), MissingLimits::Refuse) => Err(io::Error::new(
                e.kind(),
                format!(
                    "cannot set {}: {e} (sandbox.allow_missing_limits continues without this limit)",
                    file.display()
                ),
            )),
            (written, MissingLimits::Allow) => {
                warn_of(file, written);
                Ok(())
            }
            (Ok(()), MissingLimits::Refuse) => Ok(()),
        }
    }

    fn settings(
        &self,
        version: Version,
        controller: Controller,
        ram: u64,
    ) -> Vec<(&'static str, String)> {
        let limits = &self.limits;
        let memory = ram.saturating_add(limits.memory_overhead.0).to_string();
        let one = version == Version::One;
        match controller {
            // The kernel rejects a combined limit of memory and swap that is below the memory limit, so the memory
            // limit is set first.
            Controller::Memory if one => {
                vec![("memory.limit_in_bytes", memory.clone()), (V1_SWAP, memory)]
            }
            Controller::Memory => vec![("memory.max", memory), ("memory.swap.max", "0".into())],
            Controller::Pids => vec![("pids.max", limits.pids.to_string())],
            Controller::Cpu => self.cpu_settings(version),
            Controller::Io => {
                let (Some(bytes), Some(disk)) = (limits.io_bytes_per_s, &self.disk) else {
                    return Vec::new();
                };
                if one {
                    vec![
                        ("blkio.throttle.read_bps_device", format!("{disk} {bytes}")),
                        ("blkio.throttle.write_bps_device", format!("{disk} {bytes}")),
                    ]
                } else {
                    vec![("io.max", format!("{disk} rbps={bytes} wbps={bytes}"))]
                }
            }
        }
    }

    fn cpu_settings(&self, version: Version) -> Vec<(&'static str, String)> {
        let weight = u64::from(self.limits.cpu_weight);
        let quota = |millis| (u64::from(millis) * PERIOD_US / 1000).max(1000);
        let quota = self.limits.cpu_millis.map(quota);
        match version {
            Version::One => {
                let shares = (weight * SHARES / WEIGHT).max(2).to_string();
                let quota = quota.map(|quota| ("cpu.cfs_quota_us", quota.to_string()));
                [("cpu.shares", shares)].into_iter().chain(quota).collect()
            }
            Version::Two => {
                let weight = ("cpu.weight", weight.to_string());
                let quota = quota.map(|quota| ("cpu.max", format!("{quota} {PERIOD_US}")));
                [weight].into_iter().chain(quota).collect()
            }
        }
    }

    /// The hierarchies in which a VM needs a group. Creating, entering and removing a group takes the same time whether
    /// or not the group limits anything, so a VM gets no group that would not limit anything.
    fn needed(&self) -> impl Iterator<Item = &Hierarchy> {
        let all = self.hierarchies.iter();
        all.filter(|h| h.controllers.iter().any(|c| self.has_use_for(*c)))
    }

    fn has_use_for(&self, controller: Controller) -> bool {
        match controller {
            // Even without a limit, a group keeps a sandbox from getting more CPU time by having more threads.
            Controller::Memory | Controller::Cpu | Controller::Pids => true,
            Controller::Io => self.limits.io_bytes_per_s.is_some() && self.disk.is_some(),
        }
    }

    /// The files through which a VMM moves itself into the version 1 groups of its VM. This avoids the wait of
    /// [`Self::enter`], 8 ms on an idle host. Version 2 has no such file.
    pub(crate) fn tasks(&self, name: &str) -> Vec<PathBuf> {
        let ones = self.needed().filter(|h| h.version == Version::One);
        ones.map(|h| h.group.join(name).join("tasks")).collect()
    }

    /// Moves a VMM process into the groups of its VM, except the ones that it has joined. `name` is the sandbox's id or
    /// [`REBUILD`].
    pub(crate) fn enter(&self, name: &str, pid: u32, joined: &[PathBuf]) -> io::Result<()> {
        for h in self.needed() {
            let group = h.group.join(name);
            if !joined.contains(&group.join("tasks")) {
                fs::write(group.join("cgroup.procs"), pid.to_string())?;
            }
        }
        Ok(())
    }

    /// Removes the group of a VM that has exited. A missing group is not an error.
    pub(crate) fn remove(&self, id: &str) -> io::Result<()> {
        for h in &self.hierarchies {
            remove_group(&h.group.join(id))?;
        }
        Ok(())
    }

    pub(crate) fn processes(&self, id: &str) -> Vec<u32> {
        let mut pids: Vec<u32> = self
            .hierarchies
            .iter()
            .filter_map(|h| fs::read_to_string(h.group.join(id).join("cgroup.procs")).ok())
            .flat_map(|text| {
                text.lines()
                    .filter_map(|l| l.parse().ok())
                    .collect::<Vec<_>>()
            })
            .collect();
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// The names of all VM groups.
    pub(crate) fn list(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .hierarchies
            .iter()
            .filter_map(|h| fs::read_dir(&h.group).ok())
            .flatten()
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|t| t.is_dir()))
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        names.dedup();
        names
    }

    /// Removes the server's group, groups of predecessors that have ended since the last check, and the pool's group
    /// unless it contains a VM.
    pub(crate) fn close(&self) {
        self.leave_as_server();
        self.close_background();
        self.remove_former_servers();
        for h in &self.hierarchies {
            // Fails while sandboxes keep running for the next server.
            let _ = fs::remove_dir(&h.group);
        }
    }
}

/// Smallest memory limit of the pool's group. The kernel charges its bookkeeping for the VMs' groups to the pool's
/// group; with a lower limit, it refuses to create VM groups.
const LEAST_MEMORY: u64 = 16 << 20;

/// Removes a group. Retries while the group is busy, because the kernel may still count a process that was just reaped.
/// A missing group is not an error.
fn remove_group(group: &Path) -> io::Result<()> {
    const TRIES: u32 = 50;
    for left in (0..TRIES).rev() {
        match fs::remove_dir(group) {
            Err(e) if e.raw_os_error() == Some(nix::libc::EBUSY) && left > 0 => {
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => return Ok(()),
        }
    }
    Ok(())
}

fn warn_of(file: &Path, result: io::Result<()>) {
    if let Err(error) = result {
        tracing::warn!(file = %file.display(), %error, "cannot set a cgroup limit: it is not enforced");
    }
}

const V1_SWAP: &str = "memory.memsw.limit_in_bytes";

/// Replaces a setting that this kernel lacks: without swap accounting there is no limit of memory and swap together, so
/// swapping is turned off for the group.
fn possible(group: &Path, file: &'static str, value: String) -> (&'static str, String) {
    if file == V1_SWAP && !group.join(V1_SWAP).exists() {
        ("memory.swappiness", "0".to_owned())
    } else {
        (file, value)
    }
}

/// Creates the group `name` in every usable hierarchy below `root`, and returns these hierarchies.
fn find(root: &Path, name: &str) -> Vec<Hierarchy> {
    let mut found = Vec::new();
    for mount in [root.to_owned(), root.join("unified")] {
        let Ok(offered) = fs::read_to_string(mount.join("cgroup.controllers")) else {
            continue;
        };
        let controllers = offered_of(&offered);
        if !controllers.is_empty() {
            found.extend(make_v2(&mount, name, controllers));
        }
    }
    for controller in CONTROLLERS {
        let covered = found
            .iter()
            .any(|h: &Hierarchy| h.controllers.contains(&controller));
        let mount = root.join(controller.v1_mount());
        if covered || !mount.join("cgroup.procs").exists() {
            continue;
        }
        let group = mount.join(name);
        if make(&group).is_ok() {
            found.push(Hierarchy {
                version: Version::One,
                group,
                controllers: vec![controller],
            });
        }
    }
    found
}

fn offered_of(text: &str) -> Vec<Controller> {
    let has = |c: &Controller| text.split_whitespace().any(|word| word == c.name());
    CONTROLLERS.into_iter().filter(has).collect()
}

fn make(group: &Path) -> io::Result<()> {
    match fs::create_dir(group) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
        _ => Ok(()),
    }
}

/// Creates a group in a version 2 hierarchy, where each level of the tree must enable the controllers for the level
/// below. Returns `None` if the group cannot be created or no controller can be enabled.
fn make_v2(mount: &Path, name: &str, controllers: Vec<Controller>) -> Option<Hierarchy> {
    let group = mount.join(name);
    let enable_below = |dir: &Path| {
        for c in &controllers {
            // If a controller cannot be enabled, it is absent from `cgroup.subtree_control`, which is read back below.
            let _ = fs::write(dir.join("cgroup.subtree_control"), format!("+{}", c.name()));
        }
    };
    enable_below(mount);
    make(&group).ok()?;
    enable_below(&group);
    let text = fs::read_to_string(group.join("cgroup.subtree_control")).ok()?;
    let controllers = offered_of(&text);
    (!controllers.is_empty()).then_some(Hierarchy {
        version: Version::Two,
        group,
        controllers,
    })
}

/// `major:minor` of the disk that holds a directory: the whole disk, because limits do not apply to partitions.
fn disk_of(dir: &Path) -> Option<String> {
    let dev = fs::metadata(dir).ok()?.dev();
    let name = format!(
        "{}:{}",
        nix::sys::stat::major(dev),
        nix::sys::stat::minor(dev)
    );
    let block = PathBuf::from(format!("/sys/dev/block/{name}"));
    if !block.exists() {
        return None;
    }
    if block.join("partition").exists() {
        let disk = block.canonicalize().ok()?.parent()?.join("dev");
        Some(fs::read_to_string(disk).ok()?.trim().to_owned())
    } else {
        Some(name)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use model::Bytes;

    use super::*;

    pub(in crate::cgroup) fn groups(version: Version) -> Groups {
        let hierarchies = vec![Hierarchy {
            version,
            group: "/none".into(),
            controllers: CONTROLLERS.to_vec(),
        }];
        Groups {
            hierarchies,
            ..no_groups()
        }
    }

    /// The groups of a host without cgroups.
    pub(crate) fn no_groups() -> Groups {
        Groups {
            hierarchies: Vec::new(),
            limits: SandboxLimits {
                memory_overhead: Bytes::mib(64),
                cpu_weight: 50,
                cpu_millis: Some(1500),
                pids: 8,
                io_bytes_per_s: Some(1000),
                layer: None,
            },
            missing: MissingLimits::Refuse,
            disk: Some("8:0".into()),
        }
    }

    #[test]
    fn settings_of_both_versions() {
        let all = |version| -> Vec<String> {
            CONTROLLERS
                .into_iter()
                .flat_map(|c| groups(version).settings(version, c, 256 << 20))
                .map(|(file, value)| format!("{file} = {value}"))
                .collect()
        };
        assert_eq!(
            all(Version::Two),
            [
                "memory.max = 335544320",
                "memory.swap.max = 0",
                "cpu.weight = 50",
                "cpu.max = 150000 100000",
                "pids.max = 8",
                "io.max = 8:0 rbps=1000 wbps=1000",
            ]
        );
        assert_eq!(
            all(Version::One),
            [
                "memory.limit_in_bytes = 335544320",
                "memory.memsw.limit_in_bytes = 335544320",
                "cpu.shares = 512",
                "cpu.cfs_quota_us = 150000",
                "pids.max = 8",
                "blkio.throttle.read_bps_device = 8:0 1000",
                "blkio.throttle.write_bps_device = 8:0 1000",
            ]
        );
    }

    #[test]
    fn a_vm_has_groups_only_where_it_has_limits() {
        let dir = tempfile::tempdir().unwrap();
        let mut groups = groups(Version::One);
        groups.hierarchies = CONTROLLERS
            .map(|controller| Hierarchy {
                version: Version::One,
                group: dir.path().join(controller.name()),
                controllers: vec![controller],
            })
            .to_vec();
        for h in &groups.hierarchies {
            fs::create_dir(&h.group).unwrap();
        }
        let made = |groups: &Groups, number| -> Vec<&str> {
            let id = SandboxId::from_random([number; 19]);
            groups.create(&id, 1 << 20, Priority::Normal).unwrap();
            groups.enter(id.as_str(), 1, &[]).unwrap();
            let names = CONTROLLERS.map(Controller::name).into_iter();
            names
                .filter(|name| dir.path().join(name).join(id.as_str()).exists())
                .collect()
        };
        assert_eq!(made(&groups, 1), ["memory", "cpu", "pids", "io"]);
        groups.limits.io_bytes_per_s = None;
        groups.limits.cpu_millis = None;
        assert_eq!(made(&groups, 2), ["memory", "cpu", "pids"]);
        // A VMM that has joined its groups is not moved into them.
        let (id, moved) = (SandboxId::from_random([3; 19]), dir.path().join("memory"));
        let moved = moved.join(id.as_str()).join("cgroup.procs");
        groups.create(&id, 1 << 20, Priority::Normal).unwrap();
        let joined = groups.tasks(id.as_str());
        assert_eq!(joined.len(), 3);
        groups.enter(id.as_str(), 1, &joined).unwrap();
        assert!(!moved.exists());
        groups.enter(id.as_str(), 1, &joined[1..]).unwrap();
        assert!(moved.exists());
        groups.hierarchies[0].version = Version::Two;
        assert_eq!(groups.tasks(id.as_str()), joined[1..]);
        // Groups that a server with other limits created are still listed.
        assert_eq!(groups.list().len(), 3);
    }

    #[test]
    fn a_limit_that_cannot_be_enforced_is_an_error_unless_allowed() {
        let dir = tempfile::tempdir().unwrap();
        let mut groups = groups(Version::One);
        groups.hierarchies[0]
            .controllers
            .retain(|c| *c != Controller::Pids);
        groups.hierarchies[0].group = dir.path().to_owned();
        let why = groups.check_controllers().unwrap_err().to_string();
        assert!(
            why.contains("for pids:") && why.contains("sandbox.allow_missing_limits"),
            "{why}"
        );
        // A directory in place of the file stands for a kernel that rejects the setting.
        let group = dir.path().join("a");
        fs::create_dir_all(group.join("cpu.shares")).unwrap();
        let why = groups.make_group("a", 1).unwrap_err().to_string();
        assert!(why.contains("a/cpu.shares"), "{why}");
        groups.missing = MissingLimits::Allow;
        groups.check_controllers().unwrap();
        groups.make_group("a", 1).unwrap();
        // Without swap accounting, swapping is off.
        let swappiness = fs::read_to_string(group.join("memory.swappiness"));
        assert_eq!(swappiness.unwrap(), "0");
    }

    #[test]
    fn a_host_without_cgroups_offers_no_hierarchy() {
        let dir = tempfile::tempdir().unwrap();
        assert!(find(dir.path(), "cube-test").is_empty());
        assert_eq!(
            offered_of("cpuset cpu io hugetlb"),
            [Controller::Cpu, Controller::Io]
        );
    }
}
