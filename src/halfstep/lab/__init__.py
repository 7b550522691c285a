"""The course: experiments that show what mixed precision does, each measured on this machine.

An experiment (``experiment.py``) is one value: a question, up to three things to change, a
measurement that returns plain numbers, a drawing of them, and the sentence that follows from them.
``course.py`` lists them, ``experiments/`` has a file for each, ``material.py`` the GPT, text and
training that they share, ``posts.py`` a BERT and labelled posts, and ``words.toml`` every word in
English and in Chinese. ``notebook.py`` has the calls to make one from Python, and writes it as a
notebook.
"""
