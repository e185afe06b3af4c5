//! The template `code-interpreter-v1`: a guest in which the interpreter's server runs and whose language hosts are
//! warm, that is, have already executed typical first cells.
//!
//! ```text
//! wheels ─► root image (base's packages and more) ──┐
//! server, hosts, their generator ────────────────────┴─► boot → install → start → warm up → snapshot
//! ```
//! Server and hosts are installed into the template's writable layer, not into the root image: they change often, and
//! the image is large.

mod image;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use model::{Bytes, GuestPaths, WarmUpRequest, template_file};
use template::{Recipe, Work};

use crate::{
    stages::{
        guest_dir,
        kernel::Kernel,
        root_image::RootRecipe,
        stage::{self, Built, Store},
        template as templates,
    },
    tool,
    workspace::Workspace,
};

const PLACE: &str = "templates/code-interpreter-v1";
/// Guest memory. Data frames need more than `base` has. A page that a clone never touches costs the host only the ten
/// bytes that KVM keeps per page.
const MEMORY: Bytes = Bytes::mib(1024);
/// The directory in the guest where the server finds its language hosts.
const HOSTS: &str = "/usr/local/lib/cube-interpreter";
/// Port of the interpreter: on TCP for programs in the guest, on vsock for the host.
const PORT: u16 = 49_999;
const SERVER: &str = "/usr/local/bin/cube-interpreter";
/// Environment of the server, which runs as root as in E2B's sandboxes. matplotlib finds its font list in the image.
const ENVIRONMENT: &str = "HOME=/root USER=root LOGNAME=root LANG=C.UTF-8 \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    MPLCONFIGDIR=/usr/local/share/matplotlib";

/// The directory of the built template.
pub(crate) fn place(workspace: &Workspace) -> PathBuf {
    workspace.artifacts().join(PLACE)
}

/// The inputs of the root image.
#[derive(Debug)]
pub(crate) struct Sources<'a> {
    pub(crate) store: &'a Store,
    pub(crate) workspace: &'a Workspace,
    pub(crate) root: RootRecipe<'a>,
    pub(crate) kernel: Kernel,
}

impl Sources<'_> {
    /// Builds the root image and downloads the wheels of the tests, unless they are up to date.
    pub(crate) fn build(&self) -> Result<Built> {
        image::kernel_wheels(self)?;
        image::build(self)
    }
}

/// The inputs of the template.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    pub(crate) sources: Sources<'a>,
    /// The static binary of the interpreter's server.
    pub(crate) server: PathBuf,
    pub(crate) vmm: PathBuf,
}

impl Parts<'_> {
    fn hosts(&self) -> PathBuf {
        self.sources
            .workspace
            .root()
            .join("guest/interpreter/hosts")
    }
}

/// The request that records the working set and that the pool sends to every warm slot. With `store_history: false` the
/// cell takes no execution number and is not added to the history.
pub(crate) fn first_request() -> WarmUpRequest {
    WarmUpRequest {
        port: PORT,
        path: "/execute".to_owned(),
        body: r#"{"code":"1+1","store_history":false}"#.to_owned(),
    }
}

/// The result in the response to [`first_request`].
const ANSWER: &str = r#""text":"2""#;

/// Builds the template unless it is up to date.
pub(crate) fn build(parts: &Parts<'_>) -> Result<Built> {
    let Sources {
        store, workspace, ..
    } = &parts.sources;
    let image = parts.sources.build()?;
    let paths = GuestPaths {
        root: image.dir.join(image::FILE),
        ..templates::guest_paths(&workspace.guest())
    };
    let recipe = recipe(&paths)?;
    let key = stage::Recipe::new("code-interpreter")
        .text("recipe", &serde_json::to_string(&recipe)?)
        .stage("root image", &image)
        .path("hosts", &parts.hosts())?
        .path("server", &parts.server)?
        .path("guest", &workspace.guest().join(guest_dir::MANIFEST))?
        .path("vmm", &parts.vmm)?;
    store.build(&key, PLACE, |out, log| {
        let files = tempfile::tempdir()?;
        collect(parts, files.path(), log)?;
        templates::make(&recipe, Some(files.path()), &parts.vmm, out, log)?;
        let requests = serde_json::to_vec(&[first_request()])?;
        Ok(fs::write(out.join(template_file::WARM_UP), requests)?)
    })
}

/// Compiles the Java host, starts the server, and waits until it reports that its language hosts are warm.
fn recipe(paths: &GuestPaths) -> Result<Recipe> {
    let build = format!("{HOSTS}/java/build.sh");
    let install = format!("chmod 755 {SERVER}; python3 -m compileall -q {HOSTS}");
    let start = format!(
        "cd /; exec env -i {ENVIRONMENT} setsid -f {SERVER} --supervise --warm --vsock {PORT} </dev/null >/dev/null 2>&1"
    );
    let WarmUpRequest { port, path, body } = first_request();
    Ok(Recipe {
        setup: vec![
            Work::run_as_root(&["/bin/sh", &build]),
            Work::run_as_root(&["/bin/sh", "-ec", &install]),
        ],
        start: ["/bin/sh", "-ec", &start].map(str::to_owned).to_vec(),
        ready: Some(Work::Request {
            port,
            path: "/ready".to_owned(),
            body: None,
            expects: String::new(),
        }),
        first: vec![Work::Request {
            port,
            path,
            body: Some(body),
            expects: ANSWER.to_owned(),
        }],
        ..Recipe::of(paths, MEMORY)?
    })
}

/// Collects the server and its language hosts below `files`, at their paths in the guest.
fn collect(parts: &Parts<'_>, files: &Path, log: &Path) -> Result<()> {
    let below = |path: &str| files.join(path.trim_start_matches('/'));
    let (hosts, server) = (below(HOSTS), below(SERVER));
    copy_tree(&parts.hosts(), &hosts)?;
    build_library(
        &parts.hosts().join("random.c"),
        &hosts.join("random.so"),
        log,
    )?;
    fs::create_dir_all(server.parent().unwrap_or(files))?;
    fs::copy(&parts.server, &server)
        .with_context(|| format!("cannot copy {}", parts.server.display()))?;
    Ok(())
}

/// Compiles the library that makes OpenSSL take random numbers from the kernel. Its source includes no headers, so gcc
/// without development packages is enough.
fn build_library(source: &Path, library: &Path, log: &Path) -> Result<()> {
    let mut cc = Command::new("gcc");
    cc.args(["-shared", "-fPIC", "-O2", "-s", "-o"])
        .arg(library)
        .arg(source);
    tool::run(&mut cc, log)
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_name() == "__pycache__" {
            continue;
        }
        if entry.file_type()?.is_dir() {
            copy_tree(&path, &target)?;
        } else {
            fs::copy(&path, &target)?;
        }
    }
    Ok(())
}
