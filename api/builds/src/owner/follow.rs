//! Copies of templates whose home is another node of the cluster.

use std::{io, sync::Arc};

use super::{
    BuildsError, Machinery,
    task::{Owner, blocking},
};
use crate::{
    record::{Home, TemplateRecord},
    store::KeptOrder,
};

const MOVED: &str =
    "another node of the cluster is the home of the template now: start the build again";

/// A template of another node.
#[derive(Debug)]
pub struct Copied {
    /// The record as its home has it.
    pub record: TemplateRecord,
    pub home: Home,
    /// A build that this node now has.
    pub made: Option<Made>,
}

/// A build of another node whose template is in this node's pool.
#[derive(Debug)]
pub struct Made {
    pub build: String,
    /// Id of the template in the pool. It is removed if no record refers to it.
    pub template: String,
    /// The order that started the build, if its node still has it.
    pub order: Option<KeptOrder>,
}

impl<M: Machinery> Owner<M> {
    pub(super) async fn follow(&mut self, copied: Copied) -> Result<(), BuildsError> {
        let Copied { record, home, made } = copied;
        if let Some(made) = &made {
            // Unless the record refers to it.
            self.unneeded.insert(made.template.clone());
        }
        let followed = self.follow_record(record, home, made).await;
        self.remove_unneeded().await;
        followed
    }

    async fn follow_record(
        &mut self,
        record: TemplateRecord,
        home: Home,
        made: Option<Made>,
    ) -> Result<(), BuildsError> {
        let id = record.id.clone();
        let had = self.templates.get(&id).cloned();
        let mut here = had.as_ref().map(|t| t.by_build()).unwrap_or_default();
        here.extend(made.iter().map(|m| (m.build.clone(), m.template.clone())));
        let copy = record.copied(home, &here);
        if let Some(why) = copy.check() {
            return Err(BuildsError::Store(io::Error::other(why)));
        }
        if copy.builds.is_empty() {
            return match had {
                Some(_) => self.remove(&id).await,
                None => Ok(()),
            };
        }
        match &had {
            // The builds of a previous home of the template.
            Some(had) => {
                for build in had.builds.iter().filter(|build| !build.state.is_final()) {
                    self.queue
                        .retain(|queued| queued.build.build_id != build.id);
                    self.cancel(&build.id, MOVED);
                }
            }
            None => {
                if self.templates.values().any(|t| t.name == copy.name) {
                    return Err(BuildsError::Taken(copy.name));
                }
                self.check_name(&copy.name).await?;
                let (name, created) = (copy.name.clone(), copy.created_unix_ms);
                let empty = TemplateRecord::new(id.clone(), name, created);
                self.templates.insert(id.clone(), Arc::new(empty));
            }
        }
        if let Err(why) = self.change(&id, |t| *t = copy).await {
            if had.is_none() {
                self.templates.remove(&id);
            }
            return Err(why);
        }
        if let Some(made) = made
            && let Some(order) = made.order
        {
            let store = self.store.clone();
            blocking(move || store.keep_order(&id, &made.build, &order)).await?;
        }
        Ok(())
    }
}
