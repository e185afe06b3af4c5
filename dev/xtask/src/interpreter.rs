//! The template `code-interpreter-v1`: a guest in which the interpreter's server runs and its hosts have
//! already done what users do first.
//!
//! ```text
//! wheels ─► root image (base's packages and more) ──┐
//! server, hosts, their generator ────────────────────┴─► boot → install → start → warm up → snapshot
//! ```
//! Server and hosts go into the template's layer, not into the image: they change often, the image is large.

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
    template::{self, Maker},
    tool,
    workspace::Workspace,
};

const PLACE: &str = "templates/code-interpreter-v1";
/// Data frames want room; a page that a clone never touches costs it no more than KVM's ten bytes for each.
const MEMORY: Bytes = Bytes::mib(1024);
/// Where the server looks for its hosts.
const HOSTS: &str = "/usr/local/lib/cube-interpreter";
/// Port of the interpreter in guests: TCP's for programs there, vsock's for the host.
const PORT: u16 = 49_999;
/// The guest compiles the host of Java in a few seconds of CPU, on a host that may be busy.
const BUILD_PATIENCE: Duration = Duration::from_secs(240);
const SERVER: &str = "/usr/local/bin/cube-interpreter";
/// Root's, as in official sandboxes; matplotlib's list of fonts is in the image.
const ENVIRONMENT: &str = "HOME=/root USER=root LOGNAME=root LANG=C.UTF-8 \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    MPLCONFIGDIR=/usr/local/share/matplotlib";

/// What the template is made of.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    pub(crate) store: &'a Store,
    pub(crate) workspace: &'a Workspace,
    pub(crate) root: RootRecipe<'a>,
    pub(crate) kernel: Kernel,
    /// The static server.
    pub(crate) server: PathBuf,
    pub(crate) vmm: PathBuf,
}

impl Parts<'_> {
    fn hosts(&self) -> PathBuf {
        self.workspace.root().join("guest/interpreter/hosts")
    }
}

/// Makes the template unless it is fresh.
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
        let maker = Maker {
            vmm: &parts.vmm,
            run: run.path(),
            log,
        };
        // The VMM makes the directory itself, so that it never writes into one that stands.
        fs::remove_dir(out)?;
        maker
            .snapshot(paths, MEMORY, out, |vsock| {
                install(parts, &random, vsock)?;
                cells::warm_up(vsock)
            })
            .with_context(|| maker.failed("cannot make the template", template::BOOT))?;
        maker
            .record_working_set(out, cells::first_cell)
            .with_context(|| maker.failed("the template cannot be restored", template::RESTORE))?;
        let requests = serde_json::to_vec(&[cells::first()])?;
        Ok(fs::write(out.join(template_file::WARM_UP), requests)?)
    })
}

/// The library needs no header: it declares the functions that it calls.
fn build_library(source: &Path, library: &Path, log: &Path) -> Result<()> {
    let mut cc = Command::new("gcc");
    cc.args(["-shared", "-fPIC", "-O2", "-s", "-o"])
        .arg(library)
        .arg(source);
    tool::run(&mut cc, log)
}

/// Puts server and hosts into the guest and starts the server.
fn install(parts: &Parts<'_>, random: &Path, vsock: &Path) -> Result<()> {
    let mut agent = template::connect(vsock)?;
    copy_below(&mut agent, &parts.hosts(), Path::new(HOSTS))?;
    copy(&mut agent, random, &Path::new(HOSTS).join("random.so"))?;
    copy(&mut agent, &parts.server, Path::new(SERVER))?;
    let build = format!("{HOSTS}/java/build.sh");
    template::run_as_root(&mut agent, &["/bin/sh", &build], BUILD_PATIENCE)?;
    let script = format!(
        "chmod 755 {SERVER}; python3 -m compileall -q {HOSTS}; \
         cd /; exec env -i {ENVIRONMENT} setsid -f {SERVER} --supervise --warm --vsock {PORT} </dev/null >/dev/null 2>&1"
    );
    template::run_as_root(&mut agent, &["/bin/sh", "-ec", &script], template::PATIENCE)
}

fn copy_below(agent: &mut EnvdClient, from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if !entry.file_type()?.is_dir() {
            copy(agent, &path, &target)?;
        } else if entry.file_name() != "__pycache__" {
            copy_below(agent, &path, &target)?;
        }
    }
    Ok(())
}

fn copy(agent: &mut EnvdClient, from: &Path, to: &Path) -> Result<()> {
    let bytes = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    let path = to.to_str().context("a path that is not UTF-8")?;
    agent
        .write_file(path, &bytes, Some("root"))
        .with_context(|| format!("cannot write {path} in the guest"))
}
