//! `cube-api`: see `cube-api --help`.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
