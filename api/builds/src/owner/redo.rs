//! Repeats the build that a tag refers to, from the order that the store keeps.

use std::sync::Arc;

use model::clock::unix_ms;
use oci_image::registry::Credentials;

use super::{
    BuildsError, Machinery, Requested,
    task::{Owner, blocking, uuid},
};
use crate::{
    plan::From,
    record::{BuildRecord, BuildState, TemplateRecord},
    request::StartSpec,
    store::KeptOrder,
};

/// A checked request to build a template again.
#[derive(Debug)]
pub struct RedoSpec {
    pub template_id: String,
    /// Tag of the build to repeat.
    pub tag: String,
    /// Run all steps and ignore the cache.
    pub skip_cache: bool,
    /// For the image's registry.
    pub credentials: Option<Credentials>,
    /// See [`StartSpec::owner`].
    pub owner: Option<String>,
}

impl<M: Machinery> Owner<M> {
    /// Queues a build with the order of the one that the tag refers to. The new template gets all tags of that build.
    pub(super) async fn redo(&mut self, spec: RedoSpec) -> Result<Requested, BuildsError> {
        self.check_queue()?;
        self.check_open()?;
        let id = &spec.template_id;
        let template = self.templates.get(id).cloned();
        let template = template.ok_or_else(|| BuildsError::NoTemplate(id.clone()))?;
        let former = former(&template, &spec.tag)?;
        let order = self.order_of(&template, &former.id).await?;
        let start = self.start_of(&template, order, &spec)?;
        let now_ms = unix_ms();
        let build = BuildRecord {
            id: uuid()?,
            wanted: template.tags_of(&former.id),
            created_unix_ms: now_ms,
            changed_unix_ms: now_ms,
            state: BuildState::Started,
            ..former.clone()
        };
        let requested = Requested {
            template_id: id.clone(),
            build_id: build.id.clone(),
        };
        self.keep_order(&requested, &start).await?;
        self.change(id, |t| t.redo(build)).await?;
        self.enqueue(requested.clone(), start, Some(former.id.clone()));
        Ok(requested)
    }

    async fn order_of(
        &self,
        template: &Arc<TemplateRecord>,
        build: &str,
    ) -> Result<KeptOrder, BuildsError> {
        let (store, id, number) = (self.store.clone(), template.id.clone(), build.to_owned());
        let read = blocking(move || store.read_order(&id, &number)).await?;
        read.ok_or_else(|| BuildsError::NoOrder(template.name.clone()))
    }

    /// The start of the new build. Refused if the server no longer has everything it needs.
    fn start_of(
        &self,
        template: &TemplateRecord,
        order: KeptOrder,
        spec: &RedoSpec,
    ) -> Result<StartSpec, BuildsError> {
        if let From::Image(image) = &order.spec.from
            && order.had_credentials
            && spec.credentials.is_none()
        {
            return Err(BuildsError::NoCredentials(image.clone()));
        }
        // The cache may have the results of steps whose files are gone.
        let files = order.spec.steps.iter().zip(1_usize..);
        let mut files = files.filter_map(|(step, number)| Some((step.files.as_ref()?, number)));
        let lost = files.find(|(hash, _)| !self.uploads.has(&template.id, hash));
        if let Some((_, step)) = lost.filter(|_| spec.skip_cache) {
            return Err(BuildsError::NoFiles(template.name.clone(), step));
        }
        Ok(StartSpec {
            credentials: spec.credentials.clone(),
            owner: spec.owner.clone(),
            force: spec.skip_cache,
            ..order.spec
        })
    }

    /// Keeps the order of a build before it is recorded as started.
    pub(super) async fn keep_order(
        &self,
        build: &Requested,
        spec: &StartSpec,
    ) -> Result<(), BuildsError> {
        let (store, build, spec) = (self.store.clone(), build.clone(), spec.clone());
        blocking(move || store.write_order(&build.template_id, &build.build_id, &spec)).await
    }
}

/// The build that a tag refers to, unless another one with one of its tags is in progress.
fn former<'a>(template: &'a TemplateRecord, tag: &str) -> Result<&'a BuildRecord, BuildsError> {
    let name = || format!("{}:{tag}", template.name);
    let (former, _) = template
        .tagged(tag)
        .ok_or_else(|| BuildsError::NotReady(name()))?;
    let tags = template.tags_of(&former.id);
    let mut builds = template.builds.iter();
    let busy = builds.any(|b| b.state == BuildState::Started && !b.wanted.is_disjoint(&tags));
    if busy {
        return Err(BuildsError::Busy(name()));
    }
    Ok(former)
}
