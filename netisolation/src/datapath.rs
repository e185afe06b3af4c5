//! Loads the eBPF programs and their maps, and attaches the programs to devices.
//!
//! Programs, maps and links are pinned ([`bpffs`]), so they stay in force when the server dies. The next server
//! takes the programs over if it would load the same ones with the same settings. Otherwise it loads its own and
//! atomically replaces the programs of existing links. Loading takes tenths of a second, most of them for parsing the
//! kernel's type information.

// Before the programs are loaded.
pub(crate) mod bpffs;
pub(crate) mod host;
mod kfuncs;

// Their maps.
pub(crate) mod clock;
pub(crate) mod flows;
pub(crate) mod layout;
pub(crate) mod rule_sets;

pub(crate) mod gateway;
pub(crate) mod proxy_group;
mod sys;

pub(crate) use sys::{programs_on, programs_on_egress};

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use aya::{
    Ebpf, EbpfLoader, include_bytes_aligned,
    maps::{Array, HashMap, Map, MapData, MapError, RingBuf},
    programs::{
        CgroupSockAddr, CgroupSockAddrAttachType, LinkOrder, ProgramError, SchedClassifier,
        TcAttachType,
        links::{FdLink, PinnedLink},
        tc::{SchedClassifierLink, TcAttachOptions},
    },
};
use model::chain;

use self::{
    bpffs::InstanceDir,
    flows::FlowMaps,
    layout::{Pin, PinKey, Refusal, Settings, State, Tap, Uplink},
    rule_sets::RuleMap,
};
use crate::{
    config::IsolationConfig,
    error::{IsolationError, system},
    taps::device::Device,
};

/// Hash of the maps' keys, values and declarations (`build.rs`).
const LAYOUT: &str = env!("MAP_LAYOUT");
/// The programs, compiled by `build.rs`.
const OBJECT: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/net.bpf.o"));
const PROGRAMS: [&str; 3] = ["from_guest", "from_wire", "from_resolver"];
/// The programs of [`crate::datapath::proxy_group`], which need no settings.
const CONNECT_OBJECT: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/connect.bpf.o"));
const CONNECT_PROGRAMS: [(&str, CgroupSockAddrAttachType); 2] = [
    ("connect4", CgroupSockAddrAttachType::Connect4),
    ("connect6", CgroupSockAddrAttachType::Connect6),
];
const MAPS: [&str; 10] = [
    "indices", "taps", "states", "rules", "pins", "flows", "wires", "uplinks", "refusals",
    "records",
];
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
    programs_dir: PathBuf,
    sizes: Sizes,
    pub(crate) programs: Programs,
    /// The kernel's ids of the programs, which [`crate::enforcement::verify`] compares with the attached programs.
    pub(crate) from_guest_id: u32,
    pub(crate) from_wire_id: u32,
    pub(crate) from_resolver_id: u32,
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
    loaded: Arc<Mutex<Loaded>>,
    links: PathBuf,
}

/// The programs in the kernel, by name.
type Loaded = BTreeMap<&'static str, SchedClassifier>;

impl Datapath {
    /// Takes over the programs of a predecessor, or loads them; opens the pinned maps, or creates them.
    pub(crate) fn load(
        dir: InstanceDir,
        settings: &Settings,
        sizes: Sizes,
    ) -> Result<(Self, Maps), IsolationError> {
        let maps_dir = dir.make_maps_dir(&format!("{LAYOUT}-{}-{}", sizes.taps, sizes.flows))?;
        let home = maps_dir.join(programs_name(settings));
        let mut loaded = match pinned(&maps_dir, &home) {
            Ok(programs) => programs,
            Err(_) => {
                load(&maps_dir, &home, settings, sizes)?;
                pinned(&maps_dir, &home)?
            }
        };
        remove_other_programs(&maps_dir, &home);
        let mut id = |name| -> Result<u32, IsolationError> {
            let info = program(&mut loaded, name)?.info();
            Ok(info
                .map_err(|e| system(format!("read the program {name}"), e))?
                .id())
        };
        let (from_guest_id, from_wire_id) = (id("from_guest")?, id("from_wire")?);
        let from_resolver_id = id("from_resolver")?;
        let hash = |name| map(&maps_dir, name).map(Map::HashMap);
        let array = |name| map(&maps_dir, name).map(Map::Array);
        let maps = Maps {
            indices: typed("indices", hash("indices")?)?,
            taps: typed("taps", array("taps")?)?,
            states: typed("states", array("states")?)?,
            rules: typed("rules", Map::LpmTrie(map(&maps_dir, "rules")?))?,
            pins: typed("pins", hash("pins")?)?,
            uplinks: typed("uplinks", hash("uplinks")?)?,
            refusals: typed("refusals", Map::LruHashMap(map(&maps_dir, "refusals")?))?,
            records: typed("records", Map::RingBuf(map(&maps_dir, "records")?))?,
        };
        let programs = Programs {
            loaded: Arc::new(Mutex::new(loaded)),
            links: dir.links(),
        };
        let datapath = Self {
            dir,
            maps_dir,
            programs_dir: home,
            sizes,
            programs,
            from_guest_id,
            from_wire_id,
            from_resolver_id,
        };
        Ok((datapath, maps))
    }

    /// Opens new handles to the flow maps, by their pins.
    pub(crate) fn flow_maps(&self) -> Result<FlowMaps, IsolationError> {
        let open = |name| map(&self.maps_dir, name);
        Ok(FlowMaps {
            taps: typed("taps", Map::Array(open("taps")?))?,
            flows: typed("flows", Map::HashMap(open("flows")?))?,
            wires: typed("wires", Map::HashMap(open("wires")?))?,
            last_full_sweep: 0,
        })
    }

    /// Takes over the programs of [`crate::datapath::proxy_group`], with their names, or loads them.
    pub(crate) fn connect_programs(
        &self,
    ) -> Result<Vec<(&'static str, CgroupSockAddr)>, IsolationError> {
        let open = || {
            let programs = CONNECT_PROGRAMS.into_iter().map(|(name, kind)| {
                let program = CgroupSockAddr::from_pin(self.programs_dir.join(name), kind)?;
                Ok((name, program))
            });
            programs.collect::<Result<_, ProgramError>>()
        };
        if let Ok(programs) = open() {
            return Ok(programs);
        }
        let mut loaded = loader(&self.maps_dir, self.sizes)
            .load(CONNECT_OBJECT)
            .map_err(|e| system("load the programs for the proxy's cgroup", e))?;
        for (name, _) in CONNECT_PROGRAMS {
            let failed = |e: ProgramError| system(format!("load the program {name}"), e);
            let found = loaded.program_mut(name).ok_or_else(|| absent(name))?;
            let program: &mut CgroupSockAddr = found.try_into().map_err(failed)?;
            program.load().map_err(failed)?;
            let pin = self.programs_dir.join(name);
            let _absent = fs::remove_file(&pin);
            let pinned = program.pin(pin);
            pinned.map_err(|e| system(format!("pin the program {name}"), e))?;
        }
        open().map_err(|e| system("open the programs for the proxy's cgroup", e))
    }

    /// Replaces the predecessor's program on a TAP with this server's, unless they are the same. Fails if the TAP is
    /// gone.
    pub(crate) fn replace_tap_program(&self, tap: u32, ifindex: u32) -> Result<(), IsolationError> {
        let pin = self.programs.tap_link(tap, ifindex);
        let first = |programs: Vec<u32>| programs.first().copied();
        if pin.exists() && programs_on(ifindex).is_ok_and(|p| first(p) == Some(self.from_guest_id))
        {
            return Ok(());
        }
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
        if pin.exists() && programs_on(ifindex).is_ok_and(|p| p.contains(&self.from_wire_id)) {
            return Ok(());
        }
        self.programs.with("from_wire", |program| {
            if pin.exists() && replace(program, &pin).is_ok() {
                return Ok(());
            }
            let _stale = fs::remove_file(&pin);
            attach(program, device, TcAttachType::Ingress, &pin)
        })
    }

    /// Attaches the program to the resolver's device, or replaces the program of a predecessor's link.
    pub(crate) fn attach_resolver(&self, device: &Device) -> Result<(), IsolationError> {
        for stale in self.dir.resolvers() {
            if stale != device.index {
                let _already_removed = fs::remove_file(self.dir.resolver_link(stale));
            }
        }
        let pin = self.dir.resolver_link(device.index);
        self.programs.with("from_resolver", |program| {
            if pin.exists() && replace(program, &pin).is_ok() {
                return Ok(());
            }
            let _stale = fs::remove_file(&pin);
            attach(program, &device.name, TcAttachType::Egress, &pin)
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

/// Name of the directory of programs with these settings.
fn programs_name(settings: &Settings) -> String {
    let mut hasher = DefaultHasher::new();
    (OBJECT, CONNECT_OBJECT, settings).hash(&mut hasher);
    format!("programs-{:016x}", hasher.finish())
}

/// Opens the programs in `home`, if they are complete and use the maps in `maps` and no others of the same kind.
fn pinned(maps: &Path, home: &Path) -> Result<Loaded, IsolationError> {
    let mut known = BTreeSet::new();
    for name in MAPS {
        let info = map(maps, name)?.info();
        known.insert(
            info.map_err(|e| system(format!("read the map {name}"), e))?
                .id(),
        );
    }
    let mut loaded = Loaded::new();
    for name in PROGRAMS {
        let failed = |e: ProgramError| system(format!("take over the program {name}"), e);
        let program = SchedClassifier::from_pin(home.join(name)).map_err(failed)?;
        let used = program
            .info()
            .and_then(|info| info.map_ids())
            .map_err(failed)?;
        // One map is not pinned: the program's constants.
        let foreign = used.iter().flatten().filter(|id| !known.contains(id));
        if used.is_none() || foreign.count() > 1 {
            let error = io::Error::other("it uses other maps");
            return Err(system(format!("take over the program {name}"), error));
        }
        loaded.insert(name, program);
    }
    Ok(loaded)
}

/// Removes the programs of other settings. They stay in the kernel as long as a link uses them.
fn remove_other_programs(maps: &Path, home: &Path) {
    for entry in fs::read_dir(maps).into_iter().flatten().flatten() {
        let is_programs = entry.file_name().to_string_lossy().starts_with("programs-");
        if is_programs && entry.path() != home {
            let _retried_at_next_start = fs::remove_dir_all(entry.path());
        }
    }
}

/// Loads the programs and pins them in `home`, which appears when it is complete. Creates and pins the maps that do not
/// exist.
fn load(maps: &Path, home: &Path, settings: &Settings, sizes: Sizes) -> Result<(), IsolationError> {
    let mut loaded = load_object(maps, settings, sizes)?;
    // The bpffs does not allow dots in names.
    let draft = maps.join("programs-draft");
    let failed = |e| system(format!("create {}", home.display()), e);
    for stale in [&draft, home] {
        match fs::remove_dir_all(stale) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
            _ => {}
        }
    }
    fs::create_dir(&draft).map_err(failed)?;
    for name in PROGRAMS {
        let found = loaded.program_mut(name).ok_or_else(|| absent(name))?;
        let program: &mut SchedClassifier = found
            .try_into()
            .map_err(|e| system(format!("use the program {name}"), e))?;
        program
            .load()
            .map_err(|e| system(format!("load the program {name}"), e))?;
        program
            .pin(draft.join(name))
            .map_err(|e| system(format!("pin the program {name}"), e))?;
    }
    fs::rename(&draft, home).map_err(failed)
}

fn load_object(maps: &Path, settings: &Settings, sizes: Sizes) -> Result<Ebpf, IsolationError> {
    let object = kfuncs::relocate(OBJECT)
        .map_err(|e| system("resolve the kernel functions that the programs call", e))?;
    loader(maps, sizes)
        .override_global("settings", settings, true)
        .load(&object)
        .map_err(|e| system("load the programs", e))
}

/// A loader that opens the maps that are pinned in `maps`, or creates and pins them.
fn loader(maps: &Path, sizes: Sizes) -> EbpfLoader<'_> {
    let mut loader = EbpfLoader::new();
    loader.default_map_pin_directory(maps);
    for name in ["indices", "taps", "states"] {
        loader.map_max_entries(name, sizes.taps + 1);
    }
    for name in ["flows", "wires"] {
        loader.map_max_entries(name, sizes.flows);
    }
    loader
}

fn program<'a>(
    loaded: &'a mut Loaded,
    name: &'static str,
) -> Result<&'a mut SchedClassifier, IsolationError> {
    loaded.get_mut(name).ok_or_else(|| absent(name))
}

/// Opens a pinned map.
fn map(maps: &Path, name: &str) -> Result<MapData, IsolationError> {
    MapData::from_pin(maps.join(name)).map_err(|e| system(format!("open the map {name}"), e))
}

/// Checks the sizes of a map's keys and values.
fn typed<M: TryFrom<Map, Error = MapError>>(name: &str, map: Map) -> Result<M, IsolationError> {
    M::try_from(map).map_err(|e| system(format!("use the map {name}"), e))
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
