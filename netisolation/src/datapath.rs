//! The programs and maps in the kernel, and the pins by which they outlive this process.
//!
//! ```text
//! PINS/INSTANCE/             locked by the server that owns it
//!   LAYOUT-TAPS-FLOWS/       maps: a server with the same layout and sizes goes on with them
//!   links/tap-INDEX-IFINDEX  program on a TAP
//!   links/uplink-IFINDEX     program on an uplink
//! ```
//! Programs are loaded anew by every server and replace those on living links atomically.

use std::{
    fs::{self, File},
    io,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use aya::{
    Ebpf, EbpfLoader, include_bytes_aligned,
    maps::{Array, HashMap, Map, MapData, MapError, RingBuf},
    programs::{
        LinkOrder, ProgramError, SchedClassifier, TcAttachType,
        links::{FdLink, PinnedLink},
        tc::{SchedClassifierLink, TcAttachOptions},
    },
};
use model::chain;
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};

use crate::{
    IsolationError,
    device::Device,
    error::{system, unsuitable},
    kfuncs,
    layout::{Flow, FlowKey, Pin, PinKey, Refusal, Settings, State, Tap, Uplink, WireKey},
    rules::RuleSets,
};

/// Where a bpffs is, by convention.
const BPFFS: &str = "/sys/fs/bpf";
/// Changes with the maps' keys, values and declarations.
const LAYOUT: &str = env!("MAP_LAYOUT");

/// How many there can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) taps: u32,
    pub(crate) flows: u32,
}

/// The owner of what is in the kernel.
pub(crate) struct Datapath {
    home: Home,
    maps: PathBuf,
    pub(crate) tap_program: TapProgram,
    /// Numbers that the kernel gave the programs, to compare with what is attached.
    pub(crate) from_guest_id: u32,
    pub(crate) from_wire_id: u32,
    pub(crate) indices: HashMap<MapData, u32, u32>,
    pub(crate) taps: Array<MapData, Tap>,
    pub(crate) states: Array<MapData, State>,
    pub(crate) rules: RuleSets,
    pub(crate) pins: HashMap<MapData, PinKey, Pin>,
    pub(crate) uplinks: HashMap<MapData, u32, Uplink>,
    pub(crate) refusals: HashMap<MapData, Refusal, u64>,
    pub(crate) records: RingBuf<MapData>,
}

/// The directory of an instance, locked.
#[derive(Debug)]
pub(crate) struct Home {
    path: PathBuf,
    _lock: Flock<File>,
}

/// The programs, to be attached without the owner's lock.
#[derive(Clone, Debug)]
pub(crate) struct TapProgram {
    programs: Arc<Mutex<Ebpf>>,
    links: PathBuf,
}

/// Handles of the maps of flows, for the thread that reaps them.
pub(crate) struct FlowMaps {
    pub(crate) taps: Array<MapData, Tap>,
    pub(crate) flows: HashMap<MapData, FlowKey, Flow>,
    pub(crate) wires: HashMap<MapData, WireKey, FlowKey>,
}

/// A server that was killed while it started a program is survived for a moment by the child that is to become that,
/// which has its descriptors, and so its lock.
const LAST_CHILD: Duration = Duration::from_secs(1);

/// Nothing if another process has it for longer than that.
fn lock(mut directory: File) -> Option<Flock<File>> {
    let deadline = Instant::now() + LAST_CHILD;
    loop {
        match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Some(lock),
            Err((again, Errno::EWOULDBLOCK)) if Instant::now() < deadline => directory = again,
            Err(_) => return None,
        }
        thread::sleep(LAST_CHILD / 100);
    }
}

impl Home {
    /// Makes the directory, in a bpffs that is mounted if need be, and locks it.
    pub(crate) fn open(pins: &Path, instance: &str) -> Result<Self, IsolationError> {
        let path = pins.join(instance);
        ensure_bpffs(pins)?;
        let failed = |source| system(format!("make {}", path.display()), source);
        fs::create_dir_all(path.join("links")).map_err(failed)?;
        let lock = lock(File::open(&path).map_err(failed)?).ok_or_else(|| {
            unsuitable(
                format!("{} is another server's", path.display()),
                "end that server, or give this one another state directory",
            )
        })?;
        Ok(Self { path, _lock: lock })
    }

    fn links(&self) -> PathBuf {
        self.path.join("links")
    }

    /// Removes maps of other layouts.
    fn remove_others(&self, keep: &Path) {
        let Ok(entries) = fs::read_dir(&self.path) else {
            return;
        };
        for path in entries.flatten().map(|entry| entry.path()) {
            if path != keep && path != self.links() {
                // What cannot be removed now is tried again by the next server.
                let _later = fs::remove_dir_all(path);
            }
        }
    }
}

/// Mounts a bpffs where there is none.
fn ensure_bpffs(pins: &Path) -> Result<(), IsolationError> {
    let existing = pins.ancestors().find(|path| path.exists());
    if existing.is_some_and(|path| statfs(path).is_ok_and(|s| s.filesystem_type() == BPF_FS_MAGIC))
    {
        return Ok(());
    }
    let point = if pins.starts_with(BPFFS) {
        Path::new(BPFFS)
    } else {
        pins
    };
    let failed = |error: io::Error| {
        unsuitable(
            format!(
                "{} is in no bpffs, and mounting one failed: {error}",
                pins.display()
            ),
            format!("mount -t bpf bpf {}", point.display()),
        )
    };
    fs::create_dir_all(point).map_err(failed)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let data = Some("mode=700");
    mount(Some("bpf"), point, Some("bpf"), flags, data).map_err(|e| failed(e.into()))
}

impl Datapath {
    /// Loads the programs, on the maps that are pinned or on new ones.
    pub(crate) fn load(
        home: Home,
        settings: &Settings,
        sizes: Sizes,
    ) -> Result<Self, IsolationError> {
        let maps = home
            .path
            .join(format!("{LAYOUT}-{}-{}", sizes.taps, sizes.flows));
        fs::create_dir_all(&maps).map_err(|e| system(format!("make {}", maps.display()), e))?;
        home.remove_others(&maps);
        let mut loaded = load(&maps, settings, sizes)?;
        let mut id = |name| -> Result<u32, IsolationError> {
            let failed = |e: ProgramError| system(format!("load the program {name}"), e);
            let program = program(&mut loaded, name)?;
            program.load().map_err(failed)?;
            Ok(program.info().map_err(failed)?.id())
        };
        let (from_guest_id, from_wire_id, _) =
            (id("from_guest")?, id("from_wire")?, id("from_resolver")?);
        Ok(Self {
            maps,
            from_guest_id,
            from_wire_id,
            indices: map(&mut loaded, "indices")?,
            taps: map(&mut loaded, "taps")?,
            states: map(&mut loaded, "states")?,
            rules: RuleSets::new(map(&mut loaded, "rules")?),
            pins: map(&mut loaded, "pins")?,
            uplinks: map(&mut loaded, "uplinks")?,
            refusals: map(&mut loaded, "refusals")?,
            records: map(&mut loaded, "records")?,
            tap_program: TapProgram {
                programs: Arc::new(Mutex::new(loaded)),
                links: home.links(),
            },
            home,
        })
    }

    /// The maps of flows, once more.
    pub(crate) fn flow_maps(&self) -> Result<FlowMaps, IsolationError> {
        let open = |name: &str| MapData::from_pin(self.maps.join(name));
        let typed = || -> Result<FlowMaps, MapError> {
            Ok(FlowMaps {
                taps: Map::Array(open("taps")?).try_into()?,
                flows: Map::HashMap(open("flows")?).try_into()?,
                wires: Map::HashMap(open("wires")?).try_into()?,
            })
        };
        typed().map_err(|e| system("open the maps of flows", e))
    }

    /// Puts this server's program on a TAP that has a predecessor's; an error if the TAP is gone.
    pub(crate) fn replace_tap(&mut self, tap: u32, ifindex: u32) -> Result<(), IsolationError> {
        let pin = self.tap_program.link(tap, ifindex);
        self.tap_program
            .with("from_guest", |program| replace(program, &pin))
    }

    /// Forgets the link of a TAP that is gone. That of one that lives would leave it without a program.
    pub(crate) fn forget_tap(&self, tap: u32, ifindex: u32) {
        let _gone = fs::remove_file(self.tap_program.link(tap, ifindex));
    }

    /// Gives the link of a TAP's device the name of another number.
    pub(crate) fn move_link(&self, from: u32, to: u32, ifindex: u32) -> io::Result<()> {
        let link = |tap| self.tap_program.link(tap, ifindex);
        fs::rename(link(from), link(to))
    }

    /// Index and device index of the TAPs that have links.
    pub(crate) fn linked_taps(&self) -> Vec<(u32, u32)> {
        let Ok(entries) = fs::read_dir(self.home.links()) else {
            return Vec::new();
        };
        let parse = |name: String| {
            let (tap, ifindex) = name.strip_prefix("tap-")?.split_once('-')?;
            Some((tap.parse().ok()?, ifindex.parse().ok()?))
        };
        entries
            .flatten()
            .filter_map(|entry| parse(entry.file_name().to_string_lossy().into_owned()))
            .collect()
    }

    /// Puts the program on an uplink, in place of a predecessor's.
    pub(crate) fn attach_uplink(
        &mut self,
        device: &str,
        ifindex: u32,
    ) -> Result<(), IsolationError> {
        let pin = self.home.links().join(format!("uplink-{ifindex}"));
        self.tap_program.with("from_wire", |program| {
            if pin.exists() && replace(program, &pin).is_ok() {
                return Ok(());
            }
            let _stale = fs::remove_file(&pin);
            attach(program, device, TcAttachType::Ingress, &pin)
        })
    }

    /// Puts the program on the resolver's device, for as long as this process lives.
    pub(crate) fn attach_resolver(&mut self, device: &str) -> Result<(), IsolationError> {
        self.tap_program.with("from_resolver", |program| {
            let options = TcAttachOptions::TcxOrder(LinkOrder::first());
            program
                .attach_with_options(device, TcAttachType::Egress, options)
                .map(|_kept_by_the_program| ())
                .map_err(|e| system(format!("attach a program to {device}"), e))
        })
    }

    /// Removes links and maps. Only when no TAP is left.
    pub(crate) fn remove_pins(&self) {
        let _next_server_sweeps = fs::remove_dir_all(&self.home.path);
    }

    /// Readable when there are records.
    pub(crate) fn records_fd(&self) -> BorrowedFd<'_> {
        self.records.as_fd()
    }
}

impl TapProgram {
    /// Puts the program on a TAP. Takes milliseconds: the kernel waits for all CPUs.
    pub(crate) fn attach(&self, tap: u32, device: &Device) -> Result<(), IsolationError> {
        let pin = self.link(tap, device.index);
        self.with("from_guest", |program| {
            attach(program, &device.name, TcAttachType::Ingress, &pin)
        })
    }

    /// Pin of the link of a TAP.
    fn link(&self, tap: u32, ifindex: u32) -> PathBuf {
        self.links.join(format!("tap-{tap}-{ifindex}"))
    }

    fn with<T>(
        &self,
        name: &'static str,
        work: impl FnOnce(&mut SchedClassifier) -> Result<T, IsolationError>,
    ) -> Result<T, IsolationError> {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        work(program(&mut programs, name)?)
    }
}

fn load(maps: &Path, settings: &Settings, sizes: Sizes) -> Result<Ebpf, IsolationError> {
    let object = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/net.bpf.o"));
    let object = kfuncs::bind(object).map_err(|e| system("bind the programs to the kernel", e))?;
    EbpfLoader::new()
        .default_map_pin_directory(maps)
        .map_max_entries("indices", sizes.taps + 1)
        .map_max_entries("taps", sizes.taps + 1)
        .map_max_entries("states", sizes.taps + 1)
        .map_max_entries("flows", sizes.flows)
        .map_max_entries("wires", sizes.flows)
        .override_global("settings", settings, true)
        .load(&object)
        .map_err(|e| system("load the programs", e))
}

fn program<'a>(
    loaded: &'a mut Ebpf,
    name: &'static str,
) -> Result<&'a mut SchedClassifier, IsolationError> {
    let found = loaded.program_mut(name).ok_or_else(|| absent(name))?;
    found
        .try_into()
        .map_err(|e| system(format!("use the program {name}"), e))
}

fn map<M: TryFrom<Map, Error = MapError>>(
    loaded: &mut Ebpf,
    name: &'static str,
) -> Result<M, IsolationError> {
    let found = loaded.take_map(name).ok_or_else(|| absent(name))?;
    M::try_from(found).map_err(|e| system(format!("use the map {name}"), e))
}

fn absent(name: &str) -> IsolationError {
    let error = io::Error::new(io::ErrorKind::NotFound, "it is not in the object file");
    system(format!("find {name}"), error)
}

/// Attaches first in the chain, and pins the link.
fn attach(
    program: &mut SchedClassifier,
    device: &str,
    direction: TcAttachType,
    pin: &Path,
) -> Result<(), IsolationError> {
    let failed = |e: &dyn std::error::Error| {
        system(
            format!("attach a program to {device}"),
            io::Error::other(chain(e)),
        )
    };
    let options = TcAttachOptions::TcxOrder(LinkOrder::first());
    let id = program
        .attach_with_options(device, direction, options)
        .map_err(|e| failed(&e))?;
    let link = program.take_link(id).map_err(|e| failed(&e))?;
    let link: FdLink = link
        .try_into()
        .map_err(|e: aya::programs::links::LinkError| failed(&e))?;
    // The pin holds it from here on.
    link.pin(pin).map_err(|e| failed(&e))?;
    Ok(())
}

/// Replaces the program of a pinned link; an error if its device is gone.
fn replace(program: &mut SchedClassifier, pin: &Path) -> Result<(), IsolationError> {
    let failed = |e: &dyn std::error::Error| {
        system(
            format!("replace the program of {}", pin.display()),
            io::Error::other(chain(e)),
        )
    };
    let link = FdLink::from(PinnedLink::from_pin(pin).map_err(|e| failed(&e))?);
    let link = SchedClassifierLink::try_from(link).map_err(|e| failed(&e))?;
    let id = program.attach_to_link(link).map_err(|e| failed(&e))?;
    // The pin goes on holding it.
    drop(program.take_link(id).map_err(|e| failed(&e))?);
    Ok(())
}
