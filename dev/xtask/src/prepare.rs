//! Builds everything that benches and tests need, starting from a fresh checkout. All requirements on the host are
//! checked before the host is changed.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use nix::fcntl::{Flock, FlockArg};

use crate::{
    host,
    progress::Progress,
    stages::{
        archive::{self, Suite},
        binaries::{self, HostBinaries, Wanted},
        etcd, guest_dir, guest_module, initramfs,
        interpreter::{self, Parts, Sources},
        kernel::{self, Kernel, Origin},
        layer,
        root_image::{self, RootRecipe},
        sdks, site,
        stage::Store,
        suites, template, userland,
    },
    tiers::console::{self, Console},
    workspace::{Workspace, read_list},
};

/// Whether to fetch the kernel and the root image again even if their recipes have not changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Freshness {
    Keep,
    Refresh,
}

/// The packages and images to fetch from the package archive.
#[derive(Debug)]
struct FetchPlan {
    /// Host packages to install.
    missing: Vec<String>,
    kernel: bool,
    root: bool,
    userland: bool,
}

impl FetchPlan {
    fn is_empty(&self) -> bool {
        self.missing.is_empty() && !self.kernel && !self.root && !self.userland
    }

    /// The items of the plan, for an error message.
    fn describe(&self) -> String {
        let mut wanted = self.missing.clone();
        wanted.extend(self.kernel.then(|| "the guest kernel".to_owned()));
        wanted.extend(self.root.then(|| "the root image".to_owned()));
        wanted.extend(self.userland.then(|| "static programs".to_owned()));
        wanted.join(", ")
    }
}

/// A preparation whose host has been checked and has all packages.
#[derive(Debug)]
struct Preparation<'a> {
    workspace: &'a Workspace,
    progress: Progress,
    store: Store,
    codename: String,
    suites: Vec<Suite>,
}

/// Builds the kernel, the root image, the writable layer and the initramfs. This needs no KVM.
pub(crate) fn images(
    workspace: &Workspace,
    progress: Progress,
    freshness: Freshness,
) -> Result<()> {
    host::check_system()?;
    let _lock = lock(&workspace.artifacts(), progress)?;
    let preparation = Preparation::begin(workspace, progress, freshness)?;
    preparation.images()
}

/// Builds [`images`], and beside them a directory with the guest files of the kernel from the backports, which it
/// returns. The root image is the same, so it has no modules for that kernel.
pub(crate) fn newer_kernel(workspace: &Workspace, progress: Progress) -> Result<PathBuf> {
    images(workspace, progress, Freshness::Keep)?;
    let _lock = lock(&workspace.artifacts(), progress)?;
    let store = Store::open(&workspace.artifacts(), progress)?;
    let kernel = kernel(&store, Origin::Backports)?;
    let module = guest_module::build(&store, workspace, &kernel)?;
    let agent = binaries::build_agent(workspace, progress, &store.log("guest-agent")?)?;
    let initramfs = initramfs::build(&store, workspace, &kernel, &module, &agent)?;
    let dir = workspace.guest_of(Origin::Backports);
    let same = [root_image::FILE, layer::FILE].map(|name| workspace.guest().join(name));
    let own = [kernel.vmlinux(), initramfs.dir.join(initramfs::FILE)];
    for file in own.iter().chain(&same) {
        guest_dir::publish_in(workspace, &dir, file)?;
    }
    Ok(dir)
}

/// Builds everything except the optional templates.
pub(crate) fn all(
    workspace: &Workspace,
    progress: Progress,
    freshness: Freshness,
) -> Result<HostBinaries> {
    with_base(workspace, progress, freshness, Wanted::all())
}

/// Builds these programs and the template `base`.
pub(crate) fn with_base(
    workspace: &Workspace,
    progress: Progress,
    freshness: Freshness,
    programs: Wanted,
) -> Result<HostBinaries> {
    host::check_system()?;
    host::check_kvm()?;
    let _lock = lock(&workspace.artifacts(), progress)?;
    let preparation = Preparation::begin(workspace, progress, freshness)?;
    preparation.all(programs)
}

/// Builds everything except templates. This needs no KVM.
pub(crate) fn without_templates(workspace: &Workspace, progress: Progress) -> Result<HostBinaries> {
    host::check_system()?;
    let _lock = lock(&workspace.artifacts(), progress)?;
    Preparation::begin(workspace, progress, Freshness::Keep)?.without_templates(Wanted::all())
}

/// Builds everything and the template `code-interpreter-v1`. Calls `further` beside the images, after the programs.
pub(crate) fn code_interpreter(
    workspace: &Workspace,
    progress: Progress,
    further: impl FnOnce(Progress) -> Result<()> + Send,
) -> Result<HostBinaries> {
    host::check_system()?;
    host::check_kvm()?;
    let _lock = lock(&workspace.artifacts(), progress)?;
    let preparation = Preparation::begin(workspace, progress, Freshness::Keep)?;
    let (host_binaries, server) = preparation.beside(
        |progress| {
            let host_binaries = preparation.programs(progress, Wanted::all())?;
            let log = preparation.store.log("interpreter")?;
            let (package, program) = ("interpreter", "cube-interpreter");
            let server = binaries::build_guest(workspace, progress, package, program, &log)?;
            further(progress)?;
            Ok((host_binaries, server))
        },
        || preparation.sources()?.build().map(drop),
    )?;
    preparation.template(&host_binaries)?;
    let parts = Parts {
        sources: preparation.sources()?,
        server,
        vmm: host_binaries.vmm(),
    };
    interpreter::build(&parts)?;
    Ok(host_binaries)
}

/// Builds everything except the optional templates, and fetches what the soak tests put into guests.
pub(crate) fn soak(workspace: &Workspace, progress: Progress) -> Result<HostBinaries> {
    host::check_system()?;
    host::check_kvm()?;
    let _lock = lock(&workspace.artifacts(), progress)?;
    let preparation = Preparation::begin(workspace, progress, Freshness::Keep)?;
    let host_binaries = preparation.all(Wanted::all())?;
    let root = preparation
        .root_recipe()
        .build(&preparation.store, &preparation.kernel()?)?;
    let guest = root_image::packages(&root)?;
    suites::build(&preparation.store, &preparation.suites, &guest, progress)?;
    Ok(host_binaries)
}

/// Installs the SDKs of the conformance suite.
pub(crate) fn sdks(workspace: &Workspace, progress: Progress) -> Result<()> {
    host::check_system()?;
    let _lock = lock(&workspace.artifacts(), progress)?;
    let store = Store::open(&workspace.artifacts(), progress)?;
    let list = workspace
        .root()
        .join("harness/verify/conformance/host-packages.txt");
    install_missing(&store, &list, progress)?;
    sdks::build(&store, workspace)
}

/// Installs the host packages of these lists and Node, and builds the console.
pub(crate) fn console(
    workspace: &Workspace,
    progress: Progress,
    lists: &[&str],
) -> Result<Console> {
    host::check_system()?;
    let _lock = lock(&workspace.artifacts(), progress)?;
    let store = Store::open(&workspace.artifacts(), progress)?;
    for list in lists {
        install_missing(&store, &workspace.root().join(list), progress)?;
    }
    let node = sdks::node(&store, workspace)?;
    console::build(&store, workspace, &node)
}

/// Installs the SDKs, with Node, and what the integrations need of the host.
pub(crate) fn integrations(workspace: &Workspace, progress: Progress) -> Result<()> {
    sdks(workspace, progress)?;
    let _lock = lock(&workspace.artifacts(), progress)?;
    let store = Store::open(&workspace.artifacts(), progress)?;
    let list = workspace
        .root()
        .join("harness/verify/integrations/host-packages.txt");
    install_missing(&store, &list, progress)
}

/// Installs the registry and the tools that the tests of images compare with.
pub(crate) fn image_tools(workspace: &Workspace, progress: Progress) -> Result<()> {
    host::check_system()?;
    let _lock = lock(&workspace.artifacts(), progress)?;
    let store = Store::open(&workspace.artifacts(), progress)?;
    let list = workspace
        .root()
        .join("template/oci-image/tests/host-packages.txt");
    install_missing(&store, &list, progress)
}

/// Installs the programs that `dev/packaging/test.sh` runs.
pub(crate) fn package_tools(workspace: &Workspace, progress: Progress) -> Result<()> {
    host::check_system()?;
    let _lock = lock(&workspace.artifacts(), progress)?;
    let store = Store::open(&workspace.artifacts(), progress)?;
    let list = workspace.root().join("dev/packaging/host-packages.txt");
    install_missing(&store, &list, progress)
}

/// Fetches the etcd that the tier `cluster` runs.
pub(crate) fn cluster_tools(workspace: &Workspace, progress: Progress) -> Result<()> {
    host::check_system()?;
    let _lock = lock(&workspace.artifacts(), progress)?;
    let store = Store::open(&workspace.artifacts(), progress)?;
    etcd::build(&store, &archive::suites(&host::codename()?)?).map(drop)
}

/// Renders the documents as a web site. Returns its directory.
pub(crate) fn site(workspace: &Workspace, progress: Progress) -> Result<PathBuf> {
    let _lock = lock(&workspace.artifacts(), progress)?;
    let store = Store::open(&workspace.artifacts(), progress)?;
    Ok(site::build(&store, workspace)?.dir)
}

/// Installs the systems that `cube-bench peers` compares with.
pub(crate) fn peers(workspace: &Workspace, progress: Progress) -> Result<()> {
    host::check_system()?;
    let _lock = lock(&workspace.artifacts(), progress)?;
    let store = Store::open(&workspace.artifacts(), progress)?;
    let list = workspace.root().join("harness/host-packages.txt");
    install_missing(&store, &list, progress)
}

/// Installs the host packages of a list that are missing.
fn install_missing(store: &Store, list: &Path, progress: Progress) -> Result<()> {
    let missing = archive::missing(&read_list(list)?)?;
    if missing.is_empty() {
        return Ok(());
    }
    let log = store.log("packages")?;
    archive::update(progress, &log)?;
    archive::install(&missing, progress, &log)
}

/// A kernel that [`images`] or [`newer_kernel`] unpacks. Builds it if it is not up to date.
pub(crate) fn kernel(store: &Store, origin: Origin) -> Result<Kernel> {
    kernel::build(store, &host::codename()?, origin)
}

/// Takes the lock of this checkout's artifacts. Waits while another process holds it.
fn lock(dir: &Path, progress: Progress) -> Result<Flock<fs::File>> {
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let open = || fs::File::create(dir.join("lock"));
    match Flock::lock(open()?, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(lock),
        Err(_) => {
            progress.line("waiting for another cargo xtask that is building in this checkout");
            Flock::lock(open()?, FlockArg::LockExclusive)
                .map_err(|(_, error)| error)
                .with_context(|| format!("cannot lock {}", dir.join("lock").display()))
        }
    }
}

impl<'a> Preparation<'a> {
    /// Plans what to fetch, checks that this host has the disk space and the access for it, and installs missing host
    /// packages. With [`Freshness::Refresh`], removes the kernel and the root image.
    fn begin(workspace: &'a Workspace, progress: Progress, freshness: Freshness) -> Result<Self> {
        let codename = host::codename()?;
        let preparation = Self {
            store: Store::open(&workspace.artifacts(), progress)?,
            suites: archive::suites(&codename)?,
            workspace,
            progress,
            codename,
        };
        let plan = preparation.plan(freshness)?;
        if !plan.is_empty() {
            host::check_disk(&workspace.artifacts())?;
            archive::check_reachable(&preparation.suites, &plan.describe())?;
            if freshness == Freshness::Refresh {
                kernel::forget(&preparation.store)?;
                root_image::forget(&preparation.store)?;
                userland::forget(&preparation.store)?;
            }
            preparation.fetch(&plan)?;
        }
        Ok(preparation)
    }

    fn root_recipe(&self) -> RootRecipe<'_> {
        RootRecipe {
            workspace: self.workspace,
            codename: &self.codename,
            suites: &self.suites,
        }
    }

    fn plan(&self, freshness: Freshness) -> Result<FetchPlan> {
        let missing = archive::missing(&read_list(&self.workspace.recipe("host-packages.txt"))?)?;
        let kernel = kernel::fresh(&self.store, &kernel::recipe(&self.codename))?;
        let root = match &kernel {
            Some(kernel) => self.root_recipe().fresh(&self.store, kernel)?,
            None => None,
        };
        let userland = userland::fresh(&self.store, &self.codename);
        let anew = freshness == Freshness::Refresh;
        Ok(FetchPlan {
            missing,
            kernel: anew || kernel.is_none(),
            root: anew || root.is_none(),
            userland: anew || userland.is_none(),
        })
    }

    fn fetch(&self, plan: &FetchPlan) -> Result<()> {
        let log = self.store.log("packages")?;
        archive::update(self.progress, &log)?;
        if !plan.missing.is_empty() {
            archive::install(&plan.missing, self.progress, &log)?;
        }
        Ok(())
    }

    fn without_templates(&self, programs: Wanted) -> Result<HostBinaries> {
        self.beside(|progress| self.programs(progress, programs), || Ok(()))
    }

    fn all(&self, programs: Wanted) -> Result<HostBinaries> {
        let host_binaries = self.without_templates(programs)?;
        self.template(&host_binaries)?;
        Ok(host_binaries)
    }

    fn template(&self, host_binaries: &HostBinaries) -> Result<()> {
        template::build(&self.store, self.workspace, &host_binaries.vmm()).map(drop)
    }

    /// Builds programs beside the images and `further` ones: fetching and unpacking packages leaves most of a core idle.
    fn beside<T: Send>(
        &self,
        programs: impl FnOnce(Progress) -> Result<T> + Send,
        further: impl FnOnce() -> Result<()>,
    ) -> Result<T> {
        std::thread::scope(|scope| {
            let programs = scope.spawn(|| programs(self.progress.beside()));
            let images = self.images().and_then(|()| further());
            if let Err(error) = &images {
                (self.progress).line(&format!("{error:#}; waiting for the build of the programs"));
            }
            let programs = programs.join().map_err(std::panic::resume_unwind)?;
            images.and(programs)
        })
    }

    fn programs(&self, progress: Progress, programs: Wanted) -> Result<HostBinaries> {
        let log = self.store.log("host-binaries")?;
        binaries::build_host(self.workspace, progress, &log, programs)
    }

    fn sources(&self) -> Result<Sources<'_>> {
        Ok(Sources {
            store: &self.store,
            workspace: self.workspace,
            root: self.root_recipe(),
            kernel: self.kernel()?,
        })
    }

    fn images(&self) -> Result<()> {
        let (store, workspace) = (&self.store, self.workspace);
        let kernel = self.kernel()?;
        let module = guest_module::build(store, workspace, &kernel)?;
        let layer = layer::build(store)?;
        guest_dir::publish(workspace, &layer.dir.join(layer::FILE))?;
        let root = self.root_recipe().build(store, &kernel)?;
        guest_dir::publish(workspace, &root.dir.join(root_image::FILE))?;
        let userland = userland::build(store, &self.codename)?;
        for file in userland::FILES {
            guest_dir::publish(workspace, &userland.dir.join(file))?;
        }
        let agent = binaries::build_agent(workspace, self.progress, &store.log("guest-agent")?)?;
        let initramfs = initramfs::build(store, workspace, &kernel, &module, &agent)?;
        guest_dir::publish(workspace, &initramfs.dir.join(initramfs::FILE))?;
        guest_dir::write_manifest(
            store,
            workspace,
            &kernel,
            &root,
            &userland,
            &[&layer, &initramfs],
        )
    }

    fn kernel(&self) -> Result<Kernel> {
        let kernel = kernel::build(&self.store, &self.codename, Origin::Release)?;
        guest_dir::publish(self.workspace, &kernel.vmlinux())?;
        Ok(kernel)
    }
}
