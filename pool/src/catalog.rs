//! The calls that list, make, name and remove templates.

use std::path::Path;

use library::info::{DiskSpec, TemplateDefaults, TemplateInfo};
use model::{Bytes, SandboxId};
use template::Recipe;

use crate::{
    error::PoolError,
    handle::Pool,
    message::{Request, SandboxRequest},
};

impl Pool {
    /// All templates, by name.
    pub async fn templates(&self) -> Vec<TemplateInfo> {
        self.look(Request::Templates).await.unwrap_or_default()
    }

    /// Finds a template by its id, name or `name:tag`. The id of a snapshot is a template id.
    pub async fn template(&self, reference: &str) -> Option<TemplateInfo> {
        let name = reference.to_owned();
        self.look(|answer| Request::Template(name, answer))
            .await
            .flatten()
    }

    /// Adds a template whose files were made elsewhere and stay in `dir`. Other templates lose the given names.
    ///
    /// # Errors
    /// Returns [`PoolError::BadName`] for a malformed, repeated or reserved name, and [`PoolError::Failed`] if `dir` is
    /// not a usable template or the names cannot be recorded.
    pub async fn add_template(
        &self,
        dir: &Path,
        names: Vec<String>,
    ) -> Result<TemplateInfo, PoolError> {
        let dir = dir.to_owned();
        self.ask(|answer| Request::AddTemplate(dir, names, answer))
            .await
    }

    /// Removes a template and its warm slots. Running sandboxes made from it keep running.
    ///
    /// # Errors
    /// Returns [`PoolError::NoTemplate`], [`PoolError::InUse`] if a paused sandbox or another template needs its files,
    /// and [`PoolError::Failed`] if the directory of a snapshot cannot be removed.
    pub async fn remove_template(&self, reference: &str) -> Result<(), PoolError> {
        let name = reference.to_owned();
        self.ask(|answer| Request::RemoveTemplate(name, answer))
            .await
    }

    /// Makes a template from a running sandbox, or from a sandbox paused with its memory. The sandbox is not changed.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound`, `NoMemory` or `Crowded`, [`PoolError::BadName`],
    /// [`PoolError::NoSpace`], [`PoolError::TooManySaved`], and [`PoolError::Failed`]. If a snapshot of a running
    /// sandbox fails and its VM cannot be resumed, the sandbox ends.
    pub async fn snapshot(
        &self,
        id: &SandboxId,
        names: Vec<String>,
    ) -> Result<TemplateInfo, PoolError> {
        self.sandbox(id, |answer| SandboxRequest::Snapshot(names, answer))
            .await
    }

    /// Adds a disk template. Kernel, initramfs and the empty layer come from the installed template `base` or, without
    /// one, from another installed template. When this returns, the template survives a crash of the host.
    ///
    /// # Errors
    /// Returns [`PoolError::Failed`] if a file cannot be read or linked, no VM can have the requested size, or there is
    /// no installed template, and [`PoolError::NoSpace`] if there is no room for copies.
    pub async fn add_disk(&self, spec: DiskSpec) -> Result<TemplateInfo, PoolError> {
        self.ask(|answer| Request::AddDisk(spec, answer)).await
    }

    /// Adds the root image and the layer of a template as a separate, unnamed disk template. The files are shared, so
    /// this takes no space.
    ///
    /// # Errors
    /// Returns [`PoolError::NoTemplate`], [`PoolError::NoDisk`] for a snapshot, whose disk is complete only together
    /// with its memory, and the errors of [`Pool::add_disk`].
    pub async fn disk_of(&self, reference: &str) -> Result<TemplateInfo, PoolError> {
        let reference = reference.to_owned();
        self.ask(|answer| Request::DiskOf(reference, None, answer))
            .await
    }

    /// Like [`Pool::disk_of`], for guests with a different amount of memory and a disk of at least `disk`. A layer that
    /// grows is copied. Its file system grows when a guest boots.
    ///
    /// # Errors
    /// Returns the errors of [`Pool::disk_of`], and [`PoolError::Failed`] for a disk above [`MAX_DISK`].
    pub async fn disk_of_size(
        &self,
        reference: &str,
        memory: Bytes,
        disk: Bytes,
    ) -> Result<TemplateInfo, PoolError> {
        let reference = reference.to_owned();
        self.ask(|answer| Request::DiskOf(reference, Some((memory, disk)), answer))
            .await
    }

    /// The files of a template's disk, for a copy on another host, where [`Pool::add_disk`] makes a disk template from
    /// them. They never change, and may be removed with the template at any time.
    ///
    /// # Errors
    /// Returns [`PoolError::NoTemplate`], and [`PoolError::NoDisk`] for a snapshot.
    pub async fn disk_files(&self, reference: &str) -> Result<DiskSpec, PoolError> {
        let reference = reference.to_owned();
        self.ask(|answer| Request::DiskFiles(reference, answer))
            .await
    }

    /// Adds an unnamed built template with the files of another built template. The files are linked, so this takes no
    /// space and a few milliseconds, unless the memory is stored as a diff and must first be made. Removing either
    /// template leaves the other intact. The quota of templates counts both. When this returns, the template survives a
    /// crash of the host.
    ///
    /// # Errors
    /// Returns [`PoolError::NoTemplate`] if there is no such template, or it is not a built one,
    /// [`PoolError::TemplateQuota`], [`PoolError::NoSpace`], and [`PoolError::Failed`] if a file cannot be linked, for
    /// example because the template is being removed.
    pub async fn copy_of(&self, reference: &str) -> Result<TemplateInfo, PoolError> {
        let reference = reference.to_owned();
        self.ask(|answer| Request::CopyOf(reference, answer)).await
    }

    /// The recipe of an installed template. `None` if it has no recipe, or the template is not an installed one.
    ///
    /// # Errors
    /// Returns [`PoolError::NoTemplate`], and [`PoolError::Failed`] if the recipe cannot be read.
    pub async fn recipe(&self, reference: &str) -> Result<Option<Recipe>, PoolError> {
        let failed = |why: String| PoolError::Failed {
            what: "read the recipe of a template",
            why,
        };
        let name = reference.to_owned();
        let dir = self.ask(|answer| Request::RecipeDir(name, answer)).await?;
        let read = tokio::task::spawn_blocking(move || Recipe::read(&dir)).await;
        let read = read.map_err(|e| failed(e.to_string()))?;
        read.map_err(|e| failed(e.to_string()))
    }

    /// Makes an unnamed disk template from the disk of a running sandbox. The guest first writes its caches to the
    /// disk, then is paused while the layer is copied. The sandbox keeps running, even if this fails because of the
    /// guest.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound`, `NotRunning` or `Crowded`, [`PoolError::NoSpace`],
    /// [`PoolError::AgentSilent`] if the guest does not sync within two minutes, and [`PoolError::Failed`]. If the VMM
    /// does not resume the VM, the sandbox ends.
    pub async fn save_disk(&self, id: &SandboxId) -> Result<TemplateInfo, PoolError> {
        self.sandbox(id, SandboxRequest::SaveDisk).await
    }

    /// Makes a built template from a running sandbox, whose processes continue in each sandbox of the template. The
    /// guest first writes its caches to the disk and gets up to ten seconds to become idle. Its memory is written
    /// whole, so the template depends on no other one. The names move to the template at once. The list may be empty.
    /// The sandbox keeps running, even if this fails because of the guest.
    ///
    /// # Errors
    /// Returns [`PoolError::BadName`], and the errors of [`Pool::save_disk`].
    pub async fn publish(
        &self,
        id: &SandboxId,
        names: Vec<String>,
        defaults: TemplateDefaults,
    ) -> Result<TemplateInfo, PoolError> {
        self.sandbox(id, |answer| {
            SandboxRequest::Publish(names, defaults, answer)
        })
        .await
    }

    /// Records in the built template of a running sandbox which pages the sandbox has written since its start, so that
    /// later sandboxes get copies of them when they start. Use a sandbox that has done typical first work.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound` or `NotRunning`, [`PoolError::NoTemplate`] if the template is
    /// gone or not a built one, and [`PoolError::Failed`].
    pub async fn record_working_set(&self, id: &SandboxId) -> Result<(), PoolError> {
        let id = id.clone();
        self.ask(|answer| Request::RecordWorkingSet(id, answer))
            .await
    }

    /// Adds names to a template, and removes them from other templates. After a crash of the host each name belongs to
    /// exactly one template: the new one, if this call had returned.
    ///
    /// # Errors
    /// Returns [`PoolError::NoTemplate`], [`PoolError::BadName`] for a malformed, repeated or reserved name and for an
    /// installed template, and [`PoolError::Failed`] or [`PoolError::NoSpace`] if the names cannot be recorded.
    pub async fn name_template(
        &self,
        reference: &str,
        names: Vec<String>,
    ) -> Result<(), PoolError> {
        let reference = reference.to_owned();
        self.ask(|answer| Request::GiveNames(reference, names, answer))
            .await
    }

    /// Removes names from the templates that have them. The templates remain, and can be found by their ids.
    ///
    /// # Errors
    /// Returns [`PoolError::NoTemplate`] with the first name that no template has; nothing is changed then. Returns
    /// [`PoolError::BadName`] for the name of an installed template, and the other errors of [`Pool::name_template`].
    pub async fn unname_templates(&self, names: Vec<String>) -> Result<(), PoolError> {
        self.ask(|answer| Request::TakeNames(names, answer)).await
    }
}
