"""Pages: a program's source beside what each line makes, as HTML that needs no other file."""
