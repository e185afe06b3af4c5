//! The cgroup of the proxies that accept handed flows. Two eBPF programs there (`bpf/connect.bpf.c`) judge where a process
//! of the group connects, by the rules for all sandboxes. The kernel runs them, so they also hold for code that was
//! injected into a proxy.
//!
//! ```text
//! CGROUP2/cube-INSTANCE-egress/         the proxies of this server, and of predecessors until they end
//! PINS/INSTANCE-egress/connect{4,6}     links of the programs; they are removed with the group
//! ```
//! A socket belongs to the group of the process that made it. The server makes the listener, so the programs do not judge
//! the sockets that it accepts; they receive only from the resolver's device ([`crate::datapath::gateway`]).

use std::{
    error::Error,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use aya::programs::{CgroupAttachMode, CgroupSockAddr, links::FdLink};
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

use crate::{
    config::IsolationConfig,
    error::{IsolationError, system},
};

/// Where cgroups of version 2 are usually mounted: without and with hierarchies of version 1.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// Files with the limits of a group that has a memory controller.
const LIMITS: [&str; 2] = ["memory.max", "memory.swap.max"];

#[derive(Debug)]
pub(crate) struct ProxyGroup {
    mount: PathBuf,
    pub(crate) dir: PathBuf,
    pub(crate) links: PathBuf,
}

impl ProxyGroup {
    /// The group of this instance, which may not exist.
    pub(crate) fn find(config: &IsolationConfig) -> Result<Self, IsolationError> {
        let is_v2 = |at: &&Path| {
            statfs(*at).is_ok_and(|found| found.filesystem_type() == CGROUP2_SUPER_MAGIC)
        };
        let mount = MOUNTS.iter().map(Path::new).find(is_v2).ok_or_else(|| {
            let absent = "not mounted: mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified";
            system("find cgroups of version 2", io::Error::other(absent))
        })?;
        let name = format!("{}-egress", config.instance);
        Ok(Self {
            mount: mount.to_owned(),
            dir: mount.join(format!("cube-{name}")),
            links: config.pins.join(name),
        })
    }

    /// Creates the group, or takes over that of a predecessor, and attaches the programs to it. Those of a predecessor
    /// stay in force until these are.
    pub(crate) fn guard(
        &self,
        programs: Vec<(&str, CgroupSockAddr)>,
    ) -> Result<(), IsolationError> {
        let guarded = self.attach_all(programs);
        if guarded.is_err() {
            self.close();
        }
        guarded
    }

    fn attach_all(&self, programs: Vec<(&str, CgroupSockAddr)>) -> Result<(), IsolationError> {
        for dir in [&self.dir, &self.links] {
            fs::create_dir_all(dir).map_err(|e| system(format!("create {}", dir.display()), e))?;
        }
        for (name, program) in programs {
            attach(program, &self.dir, &self.links.join(name))
                .map_err(|e| system(format!("attach {name} to {}", self.dir.display()), e))?;
        }
        Ok(())
    }

    /// Moves a proxy into the group. It may use as much memory as this process, in whose group it was.
    pub(crate) fn join(&self, pid: u32) -> Result<(), IsolationError> {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
        let limits = LIMITS.iter().filter_map(|file| {
            let limit = fs::read(self.mount.join(own?).join(file)).ok()?;
            let file = self.dir.join(file);
            file.exists().then_some((file, limit))
        });
        let process = (self.dir.join("cgroup.procs"), pid.to_string().into_bytes());
        for (file, value) in limits.chain([process]) {
            fs::write(&file, value).map_err(|e| system(format!("write {}", file.display()), e))?;
        }
        Ok(())
    }

    /// Removes the group and the links, unless a proxy is left that finishes its connections.
    pub(crate) fn close(&self) {
        match fs::remove_dir(&self.dir) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {}
            _ => drop(fs::remove_dir_all(&self.links)),
        }
    }
}

/// Attaches a program to a group, and replaces the pinned link of a predecessor.
fn attach(
    mut program: CgroupSockAddr,
    group: &Path,
    pin: &Path,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    // Several links can always be at a group; the kernel refuses the flag for it.
    let id = program.attach(File::open(group)?, CgroupAttachMode::Single)?;
    let link = FdLink::try_from(program.take_link(id)?)?;
    // The bpffs does not allow dots in names.
    let mut draft = pin.as_os_str().to_owned();
    draft.push("-draft");
    let _absent = fs::remove_file(&draft);
    link.pin(&draft)?;
    Ok(fs::rename(&draft, pin)?)
}
