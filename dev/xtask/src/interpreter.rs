//! The template `code-interpreter-v1`: a guest in which the interpreter's server runs and whose language hosts are
//! warm, that is, have already executed typical first cells.
//!
//! ```text
//! wheels ─► root image (base's packages and more) ──┐
//! server, hosts, their generator ────────────────────┴─► boot → install → start → warm up → snapshot
//! ```
//! Server and hosts are installed into the template's writable layer, not into the root image: they change often, and
//! the image is large.

mod cells;
mod image;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result};
use api_types::envd::EnvdClient;
use model::{Bytes, GuestPaths, template_file};

use crate::{
    guest_dir,
    kernel::Kernel,
    root_image::RootRecipe,
    stage::{Built, Recipe, Store},
    template::{self, TemplateBuilder},
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
/// Time limit for compiling the Java host in the guest. It takes a few seconds of CPU, on a machine that may be busy.
const BUILD_TIMEOUT: Duration = Duration::from_secs(240);
const SERVER: &str = "/usr/local/bin/cube-interpreter";
/// Environment of the server, which runs as root as in E2B's sandboxes. matplotlib finds its font list in the image.
const ENVIRONMENT: &str = "HOME=/root USER=root LOGNAME=root LANG=C.UTF-8 \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    MPLCONFIGDIR=/usr/local/share/matplotlib";

/// The inputs of the template.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    pub(crate) store: &'a Store,
    pub(crate) workspace: &'a Workspace,
    pub(crate) root: RootRecipe<'a>,
    pub(crate) kernel: Kernel,
    /// The static binary of the interpreter's server.
    pub(crate) server: PathBuf,
    pub(crate) vmm: PathBuf,
}

impl Parts<'_> {
    fn hosts(&self) -> PathBuf {
        self.workspace.root().join("guest/interpreter/hosts")
    }
}

/// The request that records the working set and that the pool sends to every warm slot.
#[cfg(test)]
pub(crate) fn first_request() -> model::WarmUpRequest {
    cells::first()
}

/// Builds the template unless it is up to date.
pub(crate) fn build(parts: &Parts<'_>) -> Result<Built> {
    let image = image::build(parts)?;
    image::kernel_wheels(parts)?;
    let paths = GuestPaths {
        root: image.dir.join(image::FILE),
        ..template::guest_paths(&parts.workspace.guest())
    };
    let recipe = Recipe::new("code-interpreter")
        .text("memory", &MEMORY.to_string())
        .text("cells", &format!("{:?}", cells::first()))
        .text("environment", ENVIRONMENT)
        .text("root image at", &paths.root.display().to_string())
        .stage("root image", &image)
        .path("hosts", &parts.hosts())?
        .path("server", &parts.server)?
        .path("guest", &parts.workspace.guest().join(guest_dir::MANIFEST))?
        .path("vmm", &parts.vmm)?;
    parts.store.build(&recipe, PLACE, |out, log| {
        let run = tempfile::Builder::new()
            .prefix("cube-template-")
            .tempdir()?;
        let random = run.path().join("random.so");
        build_library(&parts.hosts().join("random.c"), &random, log)?;
        let builder = TemplateBuilder {
            vmm: &parts.vmm,
            run: run.path(),
            log,
        };
        // The VMM refuses to write a snapshot to an existing directory, so that it never overwrites one.
        fs::remove_dir(out)?;
        builder
            .snapshot(paths, MEMORY, out, |vsock| {
                install(parts, &random, vsock)?;
                cells::warm_up(vsock)
            })
            .with_context(|| builder.failed("cannot build the template", template::BOOT))?;
        builder
            .record_working_set(out, cells::first_cell)
            .with_context(|| builder.failed("cannot restore the template", template::RESTORE))?;
        let requests = serde_json::to_vec(&[cells::first()])?;
        fs::write(out.join(template_file::WARM_UP), requests)?;
        template::add_maker(out, &parts.vmm)
    })
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

/// Copies the server and its language hosts into the guest, compiles the Java host and starts the server.
fn install(parts: &Parts<'_>, random: &Path, vsock: &Path) -> Result<()> {
    let mut agent = template::connect(vsock)?;
    copy_below(&mut agent, &parts.hosts(), Path::new(HOSTS))?;
    copy(&mut agent, random, &Path::new(HOSTS).join("random.so"))?;
    copy(&mut agent, &parts.server, Path::new(SERVER))?;
    let build = format!("{HOSTS}/java/build.sh");
    template::run_as_root(&mut agent, &["/bin/sh", &build], BUILD_TIMEOUT)?;
    let script = format!(
        "chmod 755 {SERVER}; python3 -m compileall -q {HOSTS}; \
         cd /; exec env -i {ENVIRONMENT} setsid -f {SERVER} --supervise --warm --vsock {PORT} </dev/null >/dev/null 2>&1"
    );
    template::run_as_root(
        &mut agent,
        &["/bin/sh", "-ec", &script],
        template::ANSWER_TIMEOUT,
    )
}

fn copy_below(agent: &mut EnvdClient, from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_name() == "__pycache__" {
            continue;
        }
        if entry.file_type()?.is_dir() {
            copy_below(agent, &path, &target)?;
        } else {
            copy(agent, &path, &target)?;
        }
    }
    Ok(())
}

fn copy(agent: &mut EnvdClient, from: &Path, to: &Path) -> Result<()> {
    let bytes = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    let path = to
        .to_str()
        .with_context(|| format!("{} is not UTF-8", to.display()))?;
    agent
        .write_file(path, &bytes, Some("root"))
        .with_context(|| format!("cannot write {path} in the guest"))
}
