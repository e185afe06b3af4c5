//! Loads the eBPF programs and their maps, and attaches the programs to devices.
//!
//! Every server loads the programs anew and atomically replaces the programs of existing links. The links are pinned
//! ([`crate::bpffs`]), so the programs stay attached when the server dies.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
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

use crate::{
    bpffs::InstanceDir,
    config::IsolationConfig,
    device::Device,
    error::{IsolationError, system},
    flows::FlowMaps,
    kfuncs,
    layout::{Pin, PinKey, Refusal, Settings, State, Tap, Uplink},
    rule_sets::RuleMap,
};

/// Hash of the maps' keys, values and declarations (`build.rs`).
const LAYOUT: &str = env!("MAP_LAYOUT");
/// Maximum number of open flows across all sandboxes.
const MAX_FLOWS: u32 = 1 << 22;

/// Capacities of the maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    taps: u32,
    flows: u32,
}

impl Sizes {
    pub(crate) fn of(config: &IsolationConfig) -> Self {
        let flows = config.max_taps.saturating_mul(config.max_flows);
        Self {
            taps: config.max_taps,
            flows: flows.min(MAX_FLOWS),
        }
    }
}

/// The loaded programs, and the instance's directory with their links.
pub(crate) struct Datapath {
    dir: InstanceDir,
    maps_dir: PathBuf,
    pub(crate) programs: Programs,
    /// The kernel's ids of the programs, which [`crate::verify`] compares with the attached programs.
    pub(crate) from_guest_id: u32,
    pub(crate) from_wire_id: u32,
}

/// All maps except the flow maps ([`FlowMaps`]).
pub(crate) struct Maps {
    /// TAP number by device index.
    pub(crate) indices: HashMap<MapData, u32, u32>,
    pub(crate) taps: Array<MapData, Tap>,
    pub(crate) states: Array<MapData, State>,
    pub(crate) rules: RuleMap,
    pub(crate) pins: HashMap<MapData, PinKey, Pin>,
    pub(crate) uplinks: HashMap<MapData, u32, Uplink>,
    pub(crate) refusals: HashMap<MapData, Refusal, u64>,
    pub(crate) records: RingBuf<MapData>,
}

/// A cloneable handle to the loaded programs. Attaching a program with it does not need the owner's lock.
#[derive(Clone, Debug)]
pub(crate) struct Programs {
    loaded: Arc<Mutex<Ebpf>>,
    links: PathBuf,
}

impl Datapath {
    /// Loads the programs and opens the pinned maps, or creates them.
    pub(crate) fn load(
        dir: InstanceDir,
        settings: &Settings,
        sizes: Sizes,
    ) -> Result<(Self, Maps), IsolationError> {
        let maps_dir = dir.make_maps_dir(&format!("{LAYOUT}-{}-{}", sizes.taps, sizes.flows))?;
        let mut loaded = load(&maps_dir, settings, sizes)?;
        let mut id = |name| -> Result<u32, IsolationError> {
            let failed = |e: ProgramError| system(format!("load the program {name}"), e);
            let program = program(&mut loaded, name)?;
            program.load().map_err(failed)?;
            Ok(program.info().map_err(failed)?.id())
        };
        let (from_guest_id, from_wire_id, _) =
            (id("from_guest")?, id("from_wire")?, id("from_resolver")?);
        let maps = Maps {
            indices: map(&mut loaded, "indices")?,
            taps: map(&mut loaded, "taps")?,
            states: map(&mut loaded, "states")?,
            rules: map(&mut loaded, "rules")?,
            pins: map(&mut loaded, "pins")?,
            uplinks: map(&mut loaded, "uplinks")?,
            refusals: map(&mut loaded, "refusals")?,
            records: map(&mut loaded, "records")?,
        };
        let programs = Programs {
            loaded: Arc::new(Mutex::new(loaded)),
            links: dir.links(),
        };
        let datapath = Self {
            dir,
            maps_dir,
            programs,
            from_guest_id,
            from_wire_id,
        };
        Ok((datapath, maps))
    }

    /// Opens new handles to the flow maps, by their pins.
    pub(crate) fn flow_maps(&self) -> Result<FlowMaps, IsolationError> {
        let open = |name: &str| MapData::from_pin(self.maps_dir.join(name));
        let typed = || -> Result<FlowMaps, MapError> {
            Ok(FlowMaps {
                taps: Map::Array(open("taps")?).try_into()?,
                flows: Map::HashMap(open("flows")?).try_into()?,
                wires: Map::HashMap(open("wires")?).try_into()?,
            })
        };
        typed().map_err(|e| system("open the maps of flows", e))
    }

    /// Replaces the predecessor's program on a TAP with this server's. Fails if the TAP is gone.
    pub(crate) fn replace_tap_program(&self, tap: u32, ifindex: u32) -> Result<(), IsolationError> {
        let pin = self.programs.tap_link(tap, ifindex);
        self.programs
            .with("from_guest", |program| replace(program, &pin))
    }

    /// Removes the pinned link of a TAP. If the device still exists, this detaches the program from it.
    pub(crate) fn remove_tap_link(&self, tap: u32, ifindex: u32) {
        let _already_removed = fs::remove_file(self.programs.tap_link(tap, ifindex));
    }

    /// Renames the pinned link of a TAP's device when the TAP gets another number.
    pub(crate) fn rename_tap_link(&self, from: u32, to: u32, ifindex: u32) -> io::Result<()> {
        let link = |tap| self.programs.tap_link(tap, ifindex);
        fs::rename(link(from), link(to))
    }

    /// TAP number and device index of each pinned TAP link.
    pub(crate) fn tap_links(&self) -> Vec<(u32, u32)> {
        let Ok(entries) = fs::read_dir(self.dir.links()) else {
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

    /// Attaches the program to an uplink, or replaces the program of a predecessor's link.
    pub(crate) fn attach_uplink(&self, device: &str, ifindex: u32) -> Result<(), IsolationError> {
        let pin = self.dir.links().join(format!("uplink-{ifindex}"));
        self.programs.with("from_wire", |program| {
            if pin.exists() && replace(program, &pin).is_ok() {
                return Ok(());
            }
            let _stale = fs::remove_file(&pin);
            attach(program, device, TcAttachType::Ingress, &pin)
        })
    }

    /// Attaches the program to the resolver's device. The link is not pinned: it ends with this process.
    pub(crate) fn attach_resolver(&self, device: &str) -> Result<(), IsolationError> {
        self.programs.with("from_resolver", |program| {
            let options = TcAttachOptions::TcxOrder(LinkOrder::first());
            program
                .attach_with_options(device, TcAttachType::Egress, options)
                .map(|_kept_by_the_program| ())
                .map_err(|e| system(format!("attach a program to {device}"), e))
        })
    }

    /// Removes all pinned links and maps. Must be called only when no TAP is left.
    pub(crate) fn remove_pins(&self) {
        self.dir.remove();
    }
}

impl Programs {
    /// Attaches the program to a TAP. Takes milliseconds, because the kernel waits for all CPUs.
    pub(crate) fn attach_tap(&self, tap: u32, device: &Device) -> Result<(), IsolationError> {
        let pin = self.tap_link(tap, device.index);
        self.with("from_guest", |program| {
            attach(program, &device.name, TcAttachType::Ingress, &pin)
        })
    }

    fn tap_link(&self, tap: u32, ifindex: u32) -> PathBuf {
        self.links.join(format!("tap-{tap}-{ifindex}"))
    }

    fn with<T>(
        &self,
        name: &'static str,
        work: impl FnOnce(&mut SchedClassifier) -> Result<T, IsolationError>,
    ) -> Result<T, IsolationError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        work(program(&mut loaded, name)?)
    }
}

fn load(maps: &Path, settings: &Settings, sizes: Sizes) -> Result<Ebpf, IsolationError> {
    let object = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/net.bpf.o"));
    let object = kfuncs::relocate(object)
        .map_err(|e| system("resolve the kernel functions that the programs call", e))?;
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
    let error = io::Error::new(io::ErrorKind::NotFound, "not in the object file");
    system(format!("find {name}"), error)
}

/// Attaches the program as the first one of the device, and pins the link.
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
    // From here on the pin keeps the link alive.
    link.pin(pin).map_err(|e| failed(&e))?;
    Ok(())
}

/// Replaces the program of a pinned link. Fails if the link's device is gone.
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
    // The pin keeps the link alive.
    drop(program.take_link(id).map_err(|e| failed(&e))?);
    Ok(())
}
