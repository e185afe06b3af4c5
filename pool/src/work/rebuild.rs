//! Rebuilds an installed template with the current VMM, kernel and root image, on a separate thread with the lowest
//! priority.
//!
//! ```text
//! <state>/images/.new-rebuild/   root  vmlinux  initramfs.cpio   links, so that an upgrade in between changes nothing
//!                     image/     the template, until it is complete
//! <state>/images/<SHA-256 of its manifest>/                      from one rename on
//! ```
//! An interrupted rebuild leaves a directory that the next server removes.

use std::{
    fs, io,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use library::{
    durable::{Durability, replace},
    images::{Images, guest_links, link, sum_of_manifest},
    rebuilt::Rebuilt,
    vmms::{Vmm, VmmId},
};
use model::MANIFEST_NAME;
use template::{Builder, Input, Limits, Quiet, RECIPE_NAME, Recipe, files_of, sparse_sum_unless};

use crate::{
    cgroup::{Groups, REBUILD},
    leftovers::sweep_group,
};

/// The files of the template while it is built.
const IMAGE: &str = "image";
/// Standard error output of the VMMs.
const LOG: &str = "log";

/// Result of a rebuild that did not fail.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The template already matches the current files and VMM.
    Current,
    /// The template cannot be rebuilt, for this reason.
    Impossible(String),
    /// The directory of the rebuilt template, and its VMM.
    Built(PathBuf, VmmId),
}

/// A template to rebuild.
#[derive(Debug)]
pub(crate) struct RebuildPlan {
    pub(crate) id: String,
    /// Directory of the installed template, with its recipe.
    pub(crate) installed: PathBuf,
    /// The files from which its sandboxes start now, and the VMM that made them.
    pub(crate) dir: PathBuf,
    pub(crate) made_by: VmmId,
    /// The current VMM.
    pub(crate) vmm: Vmm,
    pub(crate) images: Images,
    pub(crate) groups: Arc<Groups>,
    /// Set when the pool closes.
    pub(crate) stop: Arc<AtomicBool>,
}

impl RebuildPlan {
    /// Rebuilds the template if it is outdated. Calls `on_vmm` with each VM process.
    ///
    /// # Errors
    /// Returns a human-readable message.
    pub(crate) fn run(&self, on_vmm: &dyn Fn(Arc<OwnedFd>)) -> Result<Outcome, String> {
        // On Linux, this concerns the calling thread and the processes that it starts.
        if let Err(error) = rustix::process::setpriority_process(None, 19) {
            tracing::warn!(%error, "cannot lower the priority of a template's rebuild");
        }
        let failed = |e: io::Error| e.to_string();
        let Some(recipe) = Recipe::read(&self.installed).map_err(failed)? else {
            return Ok(Outcome::Impossible("it has no recipe".to_owned()));
        };
        if let Some(gone) = inputs(&recipe).iter().find(|i| !i.path.is_file()) {
            let why = format!("{} is gone", gone.path.display());
            return Ok(Outcome::Impossible(why));
        }
        if !self.is_outdated(&recipe).map_err(failed)? {
            return Ok(Outcome::Current);
        }
        tracing::info!(
            template = self.id,
            vmm = %self.vmm.id,
            "rebuilding an installed template; until then, its sandboxes start from the old files"
        );
        let draft = self.images.begin_rebuild().map_err(failed)?;
        let built = self.build(&recipe, &draft, on_vmm);
        sweep_group(&self.groups, REBUILD);
        let removed = fs::remove_dir_all(&draft);
        let built = built?;
        if let Err(error) = removed {
            tracing::warn!(
                dir = %draft.display(),
                %error,
                "cannot remove the leftovers of a rebuild: the next server tries again"
            );
        }
        Ok(built)
    }

    /// Whether the VMM or an input file of the template has changed.
    fn is_outdated(&self, installed: &Recipe) -> io::Result<bool> {
        if self.made_by != self.vmm.id {
            return Ok(true);
        }
        // A rebuilt template has its own recipe.
        let own = Recipe::read(&self.dir)?;
        let made_from = own.as_ref().unwrap_or(installed);
        let [root, kernel, initrd] = guest_links(&self.dir);
        let links = [Some(root), Some(kernel), Some(initrd), None];
        for (input, link) in inputs(made_from).into_iter().zip(links) {
            if link.is_some_and(|link| is_same_file(&link, &input.path)) {
                continue;
            }
            if sparse_sum_unless(&input.path, &self.stop)? != input.sparse_sha256 {
                tracing::info!(
                    template = self.id,
                    file = %input.path.display(),
                    "an input file of the template has changed"
                );
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn build(
        &self,
        recipe: &Recipe,
        draft: &Path,
        on_vmm: &dyn Fn(Arc<OwnedFd>),
    ) -> Result<Outcome, String> {
        let failed = |e: io::Error| e.to_string();
        let present = self.link_inputs(recipe, draft).map_err(failed)?;
        let [root, kernel, initrd] = guest_links(draft);
        let mut linked = present.clone();
        (linked.root.path, linked.kernel.path, linked.initrd.path) = (root, kernel, initrd);
        let (image, log) = (draft.join(IMAGE), draft.join(LOG));
        let builder = Builder {
            vmm: self.vmm.program().map_err(failed)?,
            run: draft,
            log: &log,
            limits: Limits::default().for_background(),
        };
        let ram = recipe.memory.0;
        let started = |pid| {
            if self.stop.load(Ordering::SeqCst) {
                return Err(io::Error::other("the server is stopping"));
            }
            self.groups.create_for_rebuild(ram)?;
            self.groups.enter(REBUILD, pid, &[])?;
            on_vmm(Arc::new(crate::vm::open(pid)?));
            Ok(())
        };
        let files = files_of(&self.installed);
        let report = builder.build(&linked, files.as_deref(), &image, &started);
        let report = report.map_err(|error| {
            let console = error.console.last().map(String::as_str).unwrap_or_default();
            format!(
                "{}; last line of its console: {console:?}",
                model::chain(&error)
            )
        })?;
        if let Quiet::Never(_) = &report.quiet {
            tracing::warn!(
                template = self.id,
                quiet = %report.quiet,
                "clones of a rebuilt template may start slower"
            );
        }
        self.publish(&present, draft, &image).map_err(failed)
    }

    /// Links root image, kernel and initramfs into `draft`. Returns the recipe with the checksums of the current files.
    fn link_inputs(&self, recipe: &Recipe, draft: &Path) -> io::Result<Recipe> {
        let mut present = recipe.clone();
        let [root, kernel, initrd] = guest_links(draft);
        let linked = [
            (&mut present.root, root),
            (&mut present.kernel, kernel),
            (&mut present.initrd, initrd),
        ];
        for (input, to) in linked {
            link(&input.path, &to)?;
            input.sparse_sha256 = sparse_sum_unless(&to, &self.stop)?;
        }
        present.layer = Input::of(&recipe.layer.path)?;
        Ok(present)
    }

    /// Adds links and records to the template, and moves it to its final directory.
    fn publish(&self, recipe: &Recipe, draft: &Path, image: &Path) -> io::Result<Outcome> {
        for (from, to) in guest_links(draft).iter().zip(guest_links(image)) {
            fs::rename(from, to)?;
        }
        // The template was made from links that no longer exist.
        let manifest = fs::read(image.join(MANIFEST_NAME))?;
        let mut manifest: serde_json::Value = serde_json::from_slice(&manifest)?;
        manifest["root"] = recipe.root.path.to_str().into();
        let text = serde_json::to_vec_pretty(&manifest)?;
        replace(image, MANIFEST_NAME, &text, Durability::Host)?;
        let text = serde_json::to_vec_pretty(recipe)?;
        replace(image, RECIPE_NAME, &text, Durability::Host)?;
        let rebuilt = Rebuilt {
            template: self.id.clone(),
            installed_sha256: sum_of_manifest(&self.installed)?,
            vmm: self.vmm.id.clone(),
        };
        rebuilt.write(image)?;
        let place = self.images.publish(image)?;
        Ok(Outcome::Built(place, self.vmm.id.clone()))
    }
}

/// The inputs, in the order of [`guest_links`], and the layer.
fn inputs(recipe: &Recipe) -> [&Input; 4] {
    [&recipe.root, &recipe.kernel, &recipe.initrd, &recipe.layer]
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).ok();
    id(one).is_some() && id(one) == id(other)
}
