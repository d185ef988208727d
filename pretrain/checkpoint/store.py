def is_url(s): return "://" in s
