//! Dockerfiles: parsed here and sent as the steps of a build, as in the SDKs. The server never sees the file.
//!
//! Supported are FROM, RUN, COPY, ADD of local files, ENV, ARG, WORKDIR, USER, ENTRYPOINT and CMD. Instructions
//! that only describe a container (EXPOSE, LABEL, HEALTHCHECK, …) are ignored. Everything else is rejected by name,
//! because a build that silently differs from Docker's is worse than none.

mod archive;
mod context;
mod parse;
mod variables;
mod words;

use std::{
    fs,
    path::{Path, PathBuf},
};

use rest::{BuildStep, FileUpload};

use crate::{
    failure::Failure,
    server::{Server, segment},
};
use context::{Files, Ignored};
use parse::Instruction;
pub(crate) use variables::BuildArgs;
pub(crate) use words::script;

/// A Dockerfile in the form that the server accepts.
#[derive(Debug)]
pub(crate) struct Recipe {
    pub(crate) image: String,
    pub(crate) steps: Vec<BuildStep>,
    /// ENTRYPOINT and CMD.
    pub(crate) start: Option<String>,
    /// Names of given arguments without an ARG.
    pub(crate) unused: Vec<String>,
    uploads: Vec<Files>,
}

/// Reads a Dockerfile and finds the files that it copies. `context` defaults to the directory of the file.
pub(crate) fn read(
    file: &Path,
    context: Option<&Path>,
    args: &BuildArgs,
) -> Result<Recipe, Failure> {
    let text = fs::read_to_string(file)
        .map_err(|why| Failure::host(format!("{}: {why}", file.display())))?;
    let beside = file.parent().filter(|dir| !dir.as_os_str().is_empty());
    let context = context.or(beside).unwrap_or(Path::new("."));
    let at_line = |line: usize, why: String| {
        Failure::usage(format!("{}, line {line}: {why}", file.display()))
    };
    let parsed = parse::parse(&text, args).map_err(|(line, why)| at_line(line, why))?;
    let ignored = ignored(file, context)?;
    let mut recipe = Recipe {
        image: String::new(),
        steps: Vec::new(),
        start: None,
        unused: parsed.unused,
        uploads: Vec::new(),
    };
    let (mut entrypoint, mut cmd) = (None, None);
    for (line, instruction) in parsed.instructions {
        match instruction {
            Instruction::From(image) if recipe.image.is_empty() => recipe.image = image,
            Instruction::From(_) => {
                return Err(at_line(line, "several stages are not supported".to_owned())
                    .with_cure("build the earlier stages first, and COPY their files"));
            }
            _ if recipe.image.is_empty() => {
                return Err(at_line(line, "the file must begin with FROM".to_owned()));
            }
            Instruction::Step(kind, args) => recipe.steps.push(step(kind, args, None)),
            Instruction::Copy {
                from,
                to,
                owner,
                mode,
            } => {
                for source in from {
                    let files = context::find(context, &ignored, &source, &to);
                    let files = files.map_err(|why| at_line(line, why))?;
                    let args = vec![source, to.clone(), owner.clone(), mode.clone()];
                    recipe
                        .steps
                        .push(step("COPY", args, Some(files.hash.clone())));
                    recipe.uploads.push(files);
                }
            }
            Instruction::Entrypoint(command) => entrypoint = Some(command),
            Instruction::Cmd(command) => cmd = Some(command),
        }
    }
    if recipe.image.is_empty() {
        return Err(at_line(1, "there is no FROM".to_owned()));
    }
    recipe.start = words::start(entrypoint, cmd);
    Ok(recipe)
}

/// The patterns of `<Dockerfile>.dockerignore` next to the file if it exists, otherwise of `.dockerignore` in the
/// build context, as in BuildKit.
fn ignored(file: &Path, context: &Path) -> Result<Ignored, Failure> {
    let mut own = file.as_os_str().to_owned();
    own.push(".dockerignore");
    for path in [PathBuf::from(own), context.join(".dockerignore")] {
        let found = Ignored::read(&path);
        if let Some(found) =
            found.map_err(|why| Failure::host(format!("{}: {why}", path.display())))?
        {
            return Ok(found);
        }
    }
    Ok(Ignored::default())
}

fn step(kind: &str, args: Vec<String>, files_hash: Option<String>) -> BuildStep {
    BuildStep {
        kind: kind.to_owned(),
        args: Some(args),
        files_hash,
        force: None,
    }
}

impl Recipe {
    /// Uploads the files that the server does not have.
    pub(crate) fn upload(&self, server: &mut Server, template: &str) -> Result<(), Failure> {
        for files in &self.uploads {
            let path = format!("/templates/{}/files/{}", segment(template), files.hash);
            let place: FileUpload = server.get(&path)?;
            if !place.present {
                let (mut archive, length) = archive::pack(files).map_err(|why| {
                    Failure::host(format!("cannot pack the files of COPY: {why}"))
                })?;
                server.put(&place.url, &mut archive, length)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(text: &str, files: &[&str]) -> Result<Recipe, Failure> {
        let dir = tempfile::tempdir().unwrap();
        for file in files {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        let file = dir.path().join("Dockerfile");
        fs::write(&file, text).unwrap();
        read(&file, None, &BuildArgs::new())
    }

    #[test]
    fn a_usual_file_becomes_steps_and_a_start_command() {
        let text = "\
# syntax=docker/dockerfile:1
ARG TAG=3.12
FROM python:${TAG} AS app
ENV A=1 B=\"two words\"
WORKDIR /app
COPY --chown=app:app --chmod=755 *.py src /app/
RUN pip install flask && \\
    # a comment between lines
    echo done
EXPOSE 80
USER app
ENTRYPOINT [\"python\", \"it's.py\"]
CMD [\"--port\", \"80\"]
";
        let recipe = recipe(text, &["a.py", "b.py", "src/c", "no.txt"]).unwrap();
        assert_eq!(recipe.image, "python:3.12");
        let steps: Vec<_> = recipe
            .steps
            .iter()
            .map(|s| format!("{} {}", s.kind, s.args.as_ref().unwrap().join("|")))
            .collect();
        assert_eq!(
            steps,
            [
                "ENV A|1|B|two words",
                "WORKDIR /app",
                "COPY *.py|/app/|app:app|755",
                "COPY src|/app/|app:app|755",
                "RUN pip install flask &&     echo done",
                "USER app",
            ]
        );
        assert_eq!(
            recipe.start.as_deref(),
            Some(r"'python' 'it'\''s.py' '--port' '80'")
        );
        assert_eq!(recipe.uploads.len(), 2);
    }

    #[test]
    fn what_is_not_supported_is_refused_with_its_line() {
        for (text, line) in [
            ("FROM a\nFROM b", "line 2"),
            ("RUN a", "line 1"),
            ("FROM a\n\nCOPY --from=x a b", "line 3"),
            ("FROM a\nRUN --mount=type=cache,target=/x y", "line 2"),
            ("FROM a\nADD https://x/y /z", "line 2"),
            ("FROM a\nCOPY missing /z", "line 2"),
            ("FROM a\nCOPY ../x /z", "line 2"),
            ("FROM a\nSHELL [\"x\"]", "line 2"),
            ("FROM a\nNONSENSE x", "line 2"),
            ("FROM a\nCOPY onlyone", "line 2"),
            ("FROM a\nADD x.tar.gz /x", "line 2"),
            ("FROM a\n\nENV A=${B#c}", "line 3"),
            ("FROM a\nCOPY $NONE /x", "line 2"),
            ("FROM --platform=linux/arm64 a", "line 1"),
            ("# escape=`\nFROM a", "line 1"),
            ("", "line 1"),
        ] {
            let why = recipe(text, &[]).unwrap_err();
            assert!(why.message.contains(line), "{text:?}: {why}");
        }
    }
    #[test]
    fn the_file_beside_the_dockerfile_decides_what_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let context = dir.path().join("context");
        fs::create_dir_all(&context).unwrap();
        for name in ["a", "b"] {
            fs::write(context.join(name), name).unwrap();
        }
        let file = dir.path().join("app.Dockerfile");
        fs::write(&file, "FROM x\nCOPY * /x/\n").unwrap();
        let found = || {
            let recipe = read(&file, Some(&context), &BuildArgs::new());
            let paths = recipe.map(|recipe| recipe.uploads[0].paths.clone());
            paths.map_err(|why| why.message)
        };
        let names = |names: &[&str]| Ok(names.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(found(), names(&["a", "b"]));
        fs::write(context.join(".dockerignore"), "a\n.*").unwrap();
        assert_eq!(found(), names(&["b"]));
        let own = dir.path().join("app.Dockerfile.dockerignore");
        fs::write(&own, "b\n.*").unwrap();
        assert_eq!(found(), names(&["a"]));
        // An empty file also takes precedence.
        fs::write(&own, "").unwrap();
        assert_eq!(found(), names(&[".dockerignore", "a", "b"]));
        fs::write(&own, "x\n[ab]").unwrap();
        let why = found().unwrap_err();
        assert!(why.contains("app.Dockerfile.dockerignore: line 2"), "{why}");
    }
}
