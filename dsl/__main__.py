from dsl.cli import main

main()
